"""What a codec is defined as, and that layouts with it are held to that."""

from __future__ import annotations

import pytest
import torch

from phalanx.kernels import blockwise
from phalanx.parallel.communication.codecs.blockwise import Blockwise
from phalanx.prove.proof import prove
from phalanx.prove.reference import coded
from phalanx.prove.reference.coded import rounded
from tests.tasks import Digits


@pytest.mark.parametrize("bits", [8, 4])
def test_the_definition_is_what_codecs_do(bits: int) -> None:
    size = blockwise.BLOCKS[bits]
    x = torch.randn(3 * size, dtype=torch.float64)
    codec = Blockwise(bits, blockwise.FULL[bits] - 1 / 16)
    sent, found = torch.empty(codec.size(len(x), x.dtype), dtype=torch.uint8), torch.empty_like(x)
    codec.encode(x, sent)
    codec.decode(sent[None], found)
    assert torch.equal(found, rounded(f"int{bits}", x))
    assert torch.equal(
        rounded(f"int{bits}", x[: size + 3]), torch.cat([found[:size], rounded(f"int{bits}", x[size : size + 3])])
    )


@pytest.mark.parametrize("method", ["int8", "int4", "weights", "bf16", "topk", "onebit"])
def test_what_a_rank_owns_nothing_of_stays_so(method: str) -> None:
    assert rounded(method, torch.zeros(0), 5.0).shape == (0,)


def test_layouts_train_as_one_device_says_they_do() -> None:
    layouts = ["dp=2,comm=int4", "fsdp=2,comm=int8"]
    proof = prove(Digits(width=40), layouts, check=False)
    assert proof.holds, str(proof)


def test_a_codec_that_forgets_what_it_owes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded, "OWING", ())  # the other way round: ranks are forked before a test
    proof = prove(Digits(width=40), ["dp=2,comm=int4"], check=False)
    assert not proof.holds
    finding = proof.results[0].finding
    assert finding is not None
    assert "is not what one device finds that rounds as comm=int4 is defined to." in finding.cause


def test_what_only_float64_can_show_is_said() -> None:
    proof = prove(Digits(width=40), ["dp=2,comm=int8"], dtype="bf16", check=False)
    assert "float64 alone" in proof.results[0].reason
