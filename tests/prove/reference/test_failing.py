"""A task that fails on one device is told as training tells it, with the user's own lines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx import Layout
from phalanx.prove.proof import prove
from phalanx.prove.reference.failing import Unprovable, check_apart
from tests.prove.tasks import Plain

HERE = Path(__file__).name


NARROW = torch.eye(3)
"""Made before a proof begins."""


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * len(Path("not there").read_text())


@dataclass
class Fails(Plain):
    where: str = "loss"

    def model(self) -> nn.Module:
        if self.where == "model":
            return nn.Sequential(nn.Linear("6", 8))  # type: ignore[arg-type]
        return nn.Sequential(super().model(), Reads()) if self.where == "forward" else super().model()

    def data(self) -> Any:
        if self.where == "data":
            Path("not there").read_bytes()
        return super().data()

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        if self.where == "loss":
            output = output @ torch.ones(5, 1, dtype=output.dtype)
        if self.where == "float64" and output.dtype == torch.float64:
            raise ValueError("only float32 here")
        if self.where == "dtypes":
            output = NARROW.repeat(len(output), 1)[: len(output)].index_add_(0, torch.arange(len(output)), output)
        return super().loss(output, batch)


LINES = {
    "loss": "output @ torch.ones(5, 1",
    "forward": 'Path("not there").read_text()',
    "data": 'Path("not there").read_bytes()',
}


@pytest.mark.parametrize("where", LINES)
def test_the_users_own_line_is_cited_and_nobody_elses(where: str) -> None:
    proof = prove(Fails(where=where), ["dp=2"])
    assert proof.exit_code == 2
    assert f"Fails fails on one device: {'RuntimeError' if where == 'loss' else 'FileNotFoundError'}" in proof.summary
    assert HERE in proof.summary
    assert LINES[where] in proof.summary
    assert f'{HERE}", line ' in proof.evidence[0]
    for other in ("pathlib.py", "site-packages", "phalanx/train", "phalanx/prove"):
        assert other not in str(proof).replace(str(Path(__file__)), ""), other
    assert "phalanx train says the same" in proof.next


def test_a_model_that_cannot_be_made_is_one_message() -> None:
    with pytest.raises(phalanx.WrongUse, match=f"(?s)Fails fails on one device: TypeError.*{HERE}.*Mend that first"):
        prove(Fails(where="model"), ["dp=2"])


def test_what_only_a_proof_does_to_a_task_is_told_apart() -> None:
    proof = prove(Fails(where="float64"), ["dp=2"])
    assert proof.exit_code == 2
    assert "ValueError: only float32 here" in proof.summary
    assert "without what a proof does to a task, it trains" in proof.summary
    assert "tiny()" in proof.next
    narrow = prove(Fails(where="dtypes"), ["dp=2"])
    assert "meets a narrower number there" in narrow.summary
    assert HERE in narrow.summary
    assert "dtype=output.dtype" in narrow.next


def test_what_ranks_round_by_themselves_is_refused_where_their_samples_are_computed_together() -> None:
    for layout, chunked, words in (
        ("dp=2,comm=int8", False, "comm=int8 rounds what each rank has of a gradient"),
        ("cp=2,activations=bf16", True, "activations=bf16 rounds what each rank of cp=2 has of a key's gradient"),
    ):
        with pytest.raises(Unprovable, match=words):
            check_apart(Plain(), Layout.parse(layout), chunked)
    check_apart(Plain(), Layout.parse("tp=2,activations=bf16"), False)
