"""What a launcher tells a rank."""

from __future__ import annotations

import pytest

from phalanx import CannotHere
from phalanx.launch.environment import Environment


def test_alone_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Environment.detect() == Environment(0, 1, 0)
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "host", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert Environment.detect() == Environment(3, 8, 3)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert Environment.detect() == Environment(3, 8, 1)
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(CannotHere, match="MASTER_PORT is not"):
        Environment.detect()


def test_a_rank_without_a_gpu_says_so() -> None:
    with pytest.raises(CannotHere, match="GPUs"):
        Environment(9, 10, 9).device("cuda")
