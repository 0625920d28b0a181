from __future__ import annotations

import pytest

from phalanx.prove.proof import prove
from phalanx.prove.reference import onebit
from tests.tasks import Digits
from tests.train.test_frozen_variance import Chosen


def test_layouts_train_as_one_device_says_they_do() -> None:
    proof = prove(Digits(width=40), ["dp=2,comm=onebit", "dp=2,fsdp=2,comm=onebit"], check=False)
    assert proof.holds, str(proof)
    proof = prove(Chosen(kind="groups", width=40), ["dp=2,comm=onebit"], check=False)
    assert proof.holds, str(proof)


def test_another_floor_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onebit, "FLOOR", 0.06)
    proof = prove(Digits(width=40), ["dp=2,comm=onebit"], check=False)
    assert not proof.holds
    finding = proof.results[0].finding
    assert finding is not None
    assert "is not what one device finds that rounds as comm=onebit is defined to." in finding.cause
