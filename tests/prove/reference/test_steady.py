"""Casts to float32 are left out, and choices between equals are made as they were."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from phalanx.parallel.randomness.answers import Answers
from phalanx.parallel.randomness.draws import Moment, Randomness
from phalanx.prove.reference.steady import Decisions, Idle, Steady


def setup(decisions: Decisions, replay: bool) -> Randomness:
    randomness = Randomness(0, Moment(slots=np.arange(4)), torch.device("cpu"))
    times = list[torch.Tensor] if replay else None
    randomness.answers = Answers(randomness, Steady(randomness, decisions, lambda step: 4, times).answers)
    return randomness


def test_casts_stay_wide() -> None:
    x, decisions = torch.randn(4, 3, dtype=torch.float64), Decisions()
    with setup(decisions, replay=False).scope("task"):
        for y in (x.float(), x.to(torch.float32), x.to(dtype=torch.float32), F.softmax(x, -1, dtype=torch.float32)):
            assert y.dtype == torch.float64
        assert x.to(torch.float64) is x
        assert torch.ones(2).float().dtype == torch.float32
    assert decisions.lifted == 4


def test_whole_numbers_become_as_wide_as_the_rest() -> None:
    """As positions of a rotary embedding do before they are multiplied by frequencies in float64."""
    positions, decisions = torch.arange(4), Decisions()
    with setup(decisions, replay=False).scope("task"):
        for y in (positions.float(), positions.to(torch.float32), positions[:, None].to(dtype=torch.float32)):
            assert y.dtype == torch.float64
        assert (positions[:, None].float() @ torch.ones(1, 2, dtype=torch.float64)).shape == (4, 2)
        assert positions.to(torch.int32).dtype == torch.int32
    narrow = Steady(Randomness(0, Moment(), torch.device("cpu")), Decisions(), lambda step: 4, wide=False)
    assert narrow.answers[torch.Tensor.float](torch.Tensor.float, positions).dtype == torch.float32


def test_the_least_number_of_float64_fills_a_mask() -> None:
    """Models fill with the least number of what they compute in, in the default dtype."""
    scores, decisions = torch.randn(4, 3, dtype=torch.float64), Decisions()
    with setup(decisions, replay=False).scope("task"):
        least = torch.full((), torch.finfo(scores.dtype).min)
        assert torch.equal(torch.maximum(scores, least), scores)
        assert torch.full((2,), 3.0).dtype == torch.full((2,), float("-inf")).dtype == torch.float32
        assert torch.full((2,), -1.5, dtype=torch.float32).dtype == torch.float32
    assert decisions.lifted == 1


def test_ties_are_decided_as_before_and_nothing_else_is() -> None:
    decisions, x = Decisions(), torch.tensor([[1.0, 1.0, 0.0], [0.0, 2.0, 1.0]] * 2, dtype=torch.float64)
    with setup(decisions, replay=False).scope("block"):
        chosen = x.topk(1, -1).indices
    nudged = x + torch.tensor([0.0, 1e-15, 0.0]) * (1 if int(chosen[0]) == 0 else -1)
    randomness = setup(decisions, replay=True)
    with randomness.scope("block"):
        assert torch.equal(nudged.topk(1, -1).indices, chosen)
    with randomness.scope("block"):
        assert not torch.equal((-x).topk(1, -1).indices, chosen)


def test_in_one_step_half_of_the_experts_are_chosen_by_nobody() -> None:
    scores = torch.arange(24, dtype=torch.float64).view(4, 6)
    randomness = setup(Decisions(idle=Idle(step=1, experts=6)), replay=False)
    with randomness.scope("block"):
        assert scores.topk(2, -1).indices.min() > 3
        randomness.moment.step = 1
        assert scores.topk(2, -1).indices.max() < 3
        assert scores.topk(4, -1).values.isfinite().all()
        assert scores[:, :5].argmax(-1).max() == 4  # no router: it chooses between others
