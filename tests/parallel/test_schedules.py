"""Schedules: valid for any number of ranks and micro-batches, and as idle as the arithmetic says."""

from __future__ import annotations

import itertools

import pytest

from phalanx import Layout
from phalanx.parallel.schedules import CHUNKS, Action, schedule

NAMES = ("gpipe", "1f1b", "interleaved", "zb")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_every_action_once_and_nobody_waits_for_ever(name: str, ranks: int) -> None:
    for micro_batches in (1, 2, 3, 4, 7, 8, 16):
        orders = schedule(name, ranks, micro_batches)
        last = ranks * CHUNKS.get(name, 1) - 1
        kinds = ("forward", "backward", "weights") if name == "zb" else ("forward", "backward")
        assert {a for own in orders for a in own} == {
            Action(kind, stage, micro)  # type: ignore[arg-type]
            for kind, stage, micro in itertools.product(kinds, range(last + 1), range(micro_batches))
        }
        queues, done = [list(own) for own in orders], set()
        while any(queues):
            ready = [queue for queue in queues if queue and _needs(queue[0], last) <= done]
            assert ready, f"{name} on {ranks} ranks, {micro_batches} micro-batches: stuck"
            for queue in ready:
                done.add(queue.pop(0))


def _needs(action: Action, last: int) -> set[Action]:
    stage, micro = action.stage, action.micro
    if action.kind == "forward":
        return {Action("forward", stage - 1, micro)} if stage else set()
    if action.kind == "weights":
        return {Action("backward", stage, micro)}
    own = {Action("forward", stage, micro)}
    return own | ({Action("backward", stage + 1, micro)} if stage < last else set())


def idle(name: str, ranks: int, micro_batches: int) -> float:
    """The share of all ranks' time that is unused, where a forward takes as long as each half of a backward."""
    orders, over, free = schedule(name, ranks, micro_batches), {}, [0] * ranks
    last, queues = ranks * CHUNKS.get(name, 1) - 1, [list(own) for own in orders]
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue and _needs(queue[0], last) <= over.keys():
                begin = max([free[rank], *(over[needed] for needed in _needs(queue[0], last))])
                free[rank] = begin + (2 if queue[0].kind == "backward" and name != "zb" else 1)
                over[queue.pop(0)] = free[rank]
    return 1 - 3 * CHUNKS.get(name, 1) * micro_batches / max(free)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (2, 8), (4, 4), (4, 16), (8, 8), (8, 16)])
def test_they_wait_as_long_as_the_formula_says(name: str, ranks: int, micro_batches: int) -> None:
    assert idle(name, ranks, micro_batches) == pytest.approx(Layout(pp=ranks, schedule=name).idle(micro_batches))


def test_memory_is_bounded() -> None:
    """Micro-batches whose forward is over and whose backward is not."""
    for name, most in (("1f1b", 4), ("zb", 4), ("interleaved", 11), ("gpipe", 16)):
        for own in schedule(name, 4, 16):
            begun = itertools.accumulate({"forward": 1, "backward": -1, "weights": 0}[a.kind] for a in own)
            assert max(begun) <= most
