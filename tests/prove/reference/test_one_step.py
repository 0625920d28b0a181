from __future__ import annotations

import numpy as np
import torch

from phalanx.prove.reference.one_step import Step


def test_what_the_optimizer_is_given() -> None:
    step = Step(np.arange(2), [], gradients={"a": torch.ones(2), "b": None}, factors={"a": 0.5, "b": 0.5})
    assert torch.equal(step.clipped("a"), torch.full((2,), 0.5))
    assert step.clipped("b") is None
