from __future__ import annotations

import pytest
import torch

from phalanx.parallel.communication.narrow import Narrow
from phalanx.prove.proof import prove
from phalanx.prove.reference import rounded
from phalanx.recipes.gpt import GPT


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_the_definition_is_what_ranks_do(kind: str) -> None:
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    x[1, 2] = 0
    assert torch.equal(rounded.rounded(kind, x), Narrow(kind).rounded(x))


@pytest.mark.every
@pytest.mark.parametrize("layout", ["tp=2", "cp=2", "cp=2,cp_kind=ulysses"])
def test_so_is_one_that_sums_what_it_should_round(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    backward = rounded.Rounded.backward
    monkeypatch.setattr(rounded.Rounded, "backward", lambda ctx, gradient: (gradient, *backward(ctx, gradient)[1:]))
    proof = prove(GPT(heads=2, kv_heads=1), [f"{layout},activations=bf16"], check=False)
    assert not proof.holds
    finding = proof.results[0].finding
    assert finding is not None
    assert finding.rung == "gradients"
    assert "that rounds as activations=bf16 is defined to" in finding.cause
