from __future__ import annotations

import pytest
import torch

from phalanx.prove.proof import prove
from phalanx.prove.reference import low_rank
from tests.tasks import Digits


def test_layouts_train_as_one_device_says_they_do() -> None:
    proof = prove(Digits(width=40), ["dp=2,comm=powersgd:1", "dp=2,fsdp=2,zero=1,comm=powersgd:1"], check=False)
    assert proof.holds, str(proof)


def test_another_beginning_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(name: str, columns: int, rank: int) -> torch.Tensor:
        return torch.ones(columns, rank, dtype=torch.float64)

    monkeypatch.setattr(low_rank, "first_basis", other)
    proof = prove(Digits(width=40), ["dp=2,comm=powersgd:1"], check=False)
    assert not proof.holds
