"""Schedules: valid for any number of ranks and micro-batches, and as idle as the arithmetic says."""

from __future__ import annotations

import itertools

import pytest

from phalanx import Layout
from phalanx.layout import CHUNKS
from phalanx.parallel.axes.schedules import Action, forwards, receives, schedule

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


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_messages_arrive_even_where_a_rank_does_one_thing_at_a_time(name: str, training: bool) -> None:
    """Computing, sending and receiving in the order of launching, a send over when its receive is: the worst device."""
    for ranks, micro_batches in itertools.product((2, 3, 4, 8), (1, 2, 3, 5, 8)):
        queues = programs(name, ranks, micro_batches, training)
        received: set[Action] = set()
        while any(queues):
            moved = False
            for queue in queues:
                what, action = queue[0] if queue else ("", None)
                other = next((q for q in queues if q is not queue and q and q[0] == ("receive", action)), None)
                if what == "send" and other is not None:
                    received.add(other.pop(0)[1])
                elif what != "compute" or (_message(action, ranks, name) and action not in received):
                    continue
                queue.pop(0)
                moved = True
            assert moved, f"{name} on {ranks} ranks, {micro_batches} micro-batches: {[q[:1] for q in queues]}"


def programs(name: str, ranks: int, micro_batches: int, training: bool) -> list[list[tuple[str, Action]]]:
    """All that each rank launches, in order; messages by the action that needs them."""
    orders = (schedule if training else forwards)(name, ranks, micro_batches)
    found = []
    for own, due in zip(orders, receives(name, ranks, micro_batches, training), strict=True):
        launched = [("receive", action) for action in due[None]]
        for action in own:
            launched.append(("compute", action))
            if action in due:
                step = 1 if action.kind == "forward" else -1
                launched.append(("send", Action(action.kind, action.stage + step, action.micro)))
                launched += [("receive", needed) for needed in due[action]]
        found.append(launched)
    return found


def _message(action: Action, ranks: int, name: str) -> bool:
    """Whether an action works on what another rank sends."""
    last = ranks * CHUNKS.get(name, 1) - 1
    return (action.kind, action.stage) not in (("forward", 0), ("backward", last)) and action.kind != "weights"


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
