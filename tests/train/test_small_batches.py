"""A last batch of one sample: refused before the first step where a batch-norm is, or left out, or merged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import phalanx
from phalanx import WrongUse
from phalanx.data.by_length import LengthOrder
from phalanx.data.loader import Loader
from phalanx.data.order import Order, share
from phalanx.task import Task
from phalanx.train.small_batches import single_sample
from tests.parity import TOLERANCE
from tests.ranks import Ranks
from tests.tasks import Digits


@dataclass
class Normed(Digits):
    """41 samples in batches of 8: the last one has a single sample."""

    samples: int = 41
    steps: int = 12
    precision: str = "float64"

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, self.width), nn.BatchNorm1d(self.width), nn.ReLU(), nn.Linear(self.width, 3))


def refused(layout: str, **settings: Any) -> tuple[str, int]:
    with phalanx.Engine(Normed(**settings), layout, device="cpu") as engine:
        try:
            for batch in engine.batches():
                engine.step(batch)
        except WrongUse as refusal:
            return str(refusal), engine.step_number
        return "", engine.step_number


def test_it_is_refused_alike_on_all_ranks_before_the_first_step(ranks: Ranks) -> None:
    answers = [refused("dp=1"), *ranks(2, refused, "dp=2"), *ranks(2, refused, "fsdp=2,micro_batch=2")]
    assert {step for _, step in answers} == {0}, "steps were done before it was said"
    for said, _ in answers:
        assert "the batch-norm 1 needs more than one value per channel" in said
        assert "the last step of an epoch has 1 sample (41 samples in batches of 8)" in said
        assert said.endswith("last_batch=drop; or add them to the step before: last_batch=merge.")
    assert len({said for said, _ in answers}) == 1


def test_what_does_not_come_to_it_is_not_refused() -> None:
    def trains(layout: str = "dp=1", **settings: Any) -> None:
        with phalanx.Engine(Normed(**settings), layout, device="cpu") as engine:
            for batch in engine.batches():
                engine.step(batch)

    trains(steps=5)  # before the last batch of the epoch
    trains(last_batch="drop")
    trains(last_batch="merge")
    said, _ = refused("dp=1,micro_batch=1", samples=40, steps=2)
    assert "a step has 8 micro-batches, one of them of 1 sample. Set a larger micro_batch" in said


def weights(layout: str, how: str) -> dict[str, torch.Tensor]:
    with phalanx.Engine(Normed(last_batch=how), layout, device="cpu") as engine:
        for batch in engine.batches():
            engine.step(batch)
        assert engine.samples == (12 * 8 if how == "drop" else 12 * 8 + 2)
        return {name: tensor.clone() for name, tensor in engine.whole_weights().items()}


def by_hand(how: str, micro_batch: int) -> dict[str, torch.Tensor]:
    """A plain loop on one device, over epochs that are cut by hand."""
    task = Normed(last_batch=how)
    with phalanx.Engine(task, "dp=1", device="cpu") as engine:
        begins = {name: tensor.clone() for name, tensor in engine.whole_weights().items()}
    model = task.model().double()
    model.load_state_dict(begins)
    params = list(model.parameters())
    optimizer, schedule = task.optimizer(params), task.schedule()
    data, plain = task.data(), Order(41, 8, task.seed)
    for step in range(task.steps):
        epoch, place = divmod(step, 5)
        ids = plain.ids(6 * epoch + place)
        if how == "merge" and place == 4:
            ids = np.concatenate([ids, plain.ids(6 * epoch + 5)])
        each = -(-len(ids) // micro_batch)
        optimizer.zero_grad()
        for start, stop in share(len(ids), each, 1, 0):
            batch = data.batch(ids[start:stop])
            output = model(batch["x"].double())
            (nn.functional.cross_entropy(output, batch["y"], reduction="sum") / len(ids)).backward()
        torch.nn.utils.clip_grad_norm_(params, task.clip)
        for group in optimizer.param_groups:
            group["lr"] = task.learning_rate * schedule(step)
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize(("how", "layout", "together"), [
    ("drop", "dp=2", 8), ("drop", "fsdp=2,micro_batch=2", 4), ("merge", "fsdp=2,micro_batch=2", 4),
])  # fmt: skip
def test_dropped_and_merged_batches_train_as_by_hand(ranks: Ranks, how: str, layout: str, together: int) -> None:
    wanted = by_hand(how, together)
    for found in ranks(2, weights, layout, how):
        for name, want in wanted.items():
            assert torch.allclose(found[name].double(), want.double(), rtol=TOLERANCE, atol=TOLERANCE), name


def test_a_merged_step_is_cut_into_more_micro_batches() -> None:
    with phalanx.Engine(Normed(last_batch="merge"), "dp=1", device="cpu") as engine:
        found = [[len(micro.slots) for micro in batch.micro_batches] for batch in engine.loader.batches(0, 5)]
    assert found == [[8]] * 4 + [[4, 5]]


def told(order: Order, steps: int = 100, micro_batches: int = 1, ranks: int = 1, together: int = 0) -> str:
    loader = Loader(
        [], Task().collate, order, micro_batches=micro_batches, ranks=ranks, rank=0, together=together
    )  # fmt: skip
    return single_sample(loader, steps)


def test_which_micro_batches_have_one_sample() -> None:
    assert told(Order(41, 8)).startswith("the last step of an epoch has 1 sample (41 samples")
    assert told(Order(41, 8), steps=5) == told(Order(40, 8)) == told(Order(41, 8), steps=0) == ""
    assert told(Order(41, 8, last_batch="drop")) == told(Order(41, 8, last_batch="merge")) == ""
    assert "has 5 samples in 4 micro-batches, one of them of 1" in told(Order(45, 8), micro_batches=4)
    assert told(Order(42, 8), ranks=2) == "", "ranks compute together"
    assert "a step has 2 micro-batches" in told(Order(40, 2), ranks=2, together=1), "sites do not"
    merged = told(Order(41, 2, last_batch="merge"))
    assert merged.endswith("Leave these samples out: last_batch=drop")
    lengths = LengthOrder(40, 8, lengths=np.array([1] * 39 + [50]), batch_tokens=50)
    assert told(lengths).startswith("a step has 1 micro-batch, one of them of 1 sample")
