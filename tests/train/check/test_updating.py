"""A schedule is refused in the same words by the check and by the engine; the check adds the line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from phalanx import Engine, WrongUse
from phalanx.train.check.beside import checked
from tests.mistakes import Points, Scheduler


@dataclass
class Scheduled(Points):
    gives: Any = 1.0
    from_step: int = 0

    def schedule(self) -> Any:
        return lambda step: self.gives if step >= self.from_step else 1.0


WRONG = [True, torch.tensor(0.5), "0.5", None, -1.0, float("nan"), float("inf")]


@pytest.mark.parametrize("task", [*(Scheduled(gives=each) for each in WRONG), Scheduler()], ids=str)
def test_the_check_and_the_engine_refuse_alike(task: Points) -> None:
    with pytest.raises(WrongUse) as refused:
        Engine(task, device="cpu")
    told = checked(task).refusal
    assert told.startswith(f"{refused.value} (tests/")
    assert told.count(".py:") == 1


@pytest.mark.parametrize("gives", WRONG, ids=str)
def test_a_later_step_is_looked_at_too(gives: Any) -> None:
    assert "Scheduled.schedule gives " in checked(Scheduled(gives=gives, from_step=3)).refusal
    assert "for step 3. Return a function of the step" in checked(Scheduled(gives=gives, from_step=3)).refusal


@pytest.mark.parametrize("gives", [1, 0.5, np.float32(0.5), np.int64(1)], ids=str)
def test_numbers_are_factors(gives: Any) -> None:
    assert checked(Scheduled(gives=gives)).refusal == ""
