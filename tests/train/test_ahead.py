"""Micro-batches that are copied ahead are those that are computed with, in their order, each once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import phalanx
from phalanx.data.loader import MicroBatch, StepBatch
from phalanx.task import Batch
from phalanx.train.ahead import Ahead
from tests.tasks import Digits


def steps(count: int, micro: int, events: list[str]) -> Iterator[StepBatch]:
    for step in range(count):
        events.append(f"read {step}")
        each = [MicroBatch({"x": torch.tensor(10 * step + n)}, np.zeros(1, dtype=np.int64)) for n in range(micro)]
        yield StepBatch(step, each, micro, "")


def noting(events: list[str]) -> Ahead:
    def place(tensors: dict[str, Any]) -> Batch:
        events.append(f"copy {int(tensors['x'])}")
        return Batch({"x": tensors["x"].clone()})

    ahead = Ahead(place, torch.device("cpu"))
    ahead.used = True
    return ahead


def test_each_is_copied_once_while_the_one_before_it_computes() -> None:
    events: list[str] = []
    ahead = noting(events)
    for batch in ahead.read(steps(3, 2, events)):
        for micro in batch.micro_batches:
            placed = ahead(micro.tensors)
            assert torch.equal(placed["x"], micro.tensors["x"])
            events.append(f"compute {int(placed['x'])}")
    assert events == [
        "read 0", "read 1", "copy 0", "copy 1", "compute 0", "copy 10", "compute 1",
        "read 2", "copy 11", "compute 10", "copy 20", "compute 11", "copy 21", "compute 20", "compute 21",
    ]  # fmt: skip


def test_batches_that_are_passed_over_or_used_again_or_of_others_are_right() -> None:
    events: list[str] = []
    ahead = noting(events)
    other = {"x": torch.tensor(77)}
    for batch in ahead.read(steps(4, 1, events)):
        if batch.step == 1:
            continue
        (micro,) = batch.micro_batches
        assert all(int(ahead(tensors)["x"]) == int(tensors["x"]) for tensors in (micro.tensors, micro.tensors, other))
    for batch in ahead.read(steps(2, 1, events)):  # the same numbers, other tensors
        assert ahead(batch.micro_batches[0].tensors)["x"] == batch.step * 10


def test_what_cannot_be_read_is_told_after_the_step_before_it() -> None:
    def broken() -> Iterator[StepBatch]:
        yield from steps(2, 1, [])
        raise phalanx.WrongUse("a bad sample")

    batches = noting([]).read(broken())
    assert [next(batches).step, next(batches).step] == [0, 1]
    with pytest.raises(phalanx.WrongUse, match="a bad sample"):
        next(batches)


def test_on_a_processor_batches_are_read_when_they_are_asked_for() -> None:
    events: list[str] = []
    ahead = Ahead(lambda tensors: Batch(tensors), torch.device("cpu"))
    for batch in ahead.read(steps(2, 1, events)):
        assert events[-1] == f"read {batch.step}"


def losses(layout: str, used: bool) -> tuple[list[float], list[bool]]:
    """By step, and whether the next micro-batch was on its way to the device then."""
    found, coming = [], []
    task = Digits(steps=10, global_batch=8, width=64, precision="fp32", workers=2)
    with phalanx.Engine(task, layout, device="cuda") as engine:
        assert engine.to_device.used
        engine.to_device.used = used
        for batch in engine.batches():
            found.append(engine.step(batch).loss)
            ahead = engine.to_device._coming
            coming.append(ahead is not None and all(value.is_cuda for value in ahead.placed.values()))
            if batch.step == 4:
                engine.evaluate()
    return found, coming


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["dp=1", "dp=1,micro_batch=2", "dp=1,graphs=step", "dp=1,micro_batch=4,graphs=step"])
def test_steps_with_batches_that_were_copied_ahead_are_the_same_bits(layout: str) -> None:
    ahead, coming = losses(layout, used=True)
    assert ahead == losses(layout, used=False)[0]
    assert coming == [True] * 9 + [False]
