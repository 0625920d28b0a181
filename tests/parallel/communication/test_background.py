"""Exchanges that threads carry on."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest

from phalanx.parallel.communication.background import Background
from phalanx.parallel.communication.pending import Pending


def test_hops_are_taken_in_order_and_a_later_one_does_not_wait_for_an_earlier_ones_end() -> None:
    background, done, gate = Background("dp"), list[str](), threading.Event()

    def exchange(name: str, last: threading.Event | None) -> Pending:
        def end() -> None:
            if last is not None:
                assert last.wait(10)
            done.append(f"{name} ends")

        def hop() -> Pending:
            done.append(f"{name} hops")
            if name == "b":
                gate.set()
            return Pending((), end)

        return Pending((), hop)

    taken = [background.take(exchange(name, gate if name == "a" else None), nullcontext()) for name in "ab"]
    for each in taken:
        each.wait()
        assert each.over
    assert done == ["a hops", "b hops", "a ends", "b ends"]
    background.close()
    assert not any("exchanges along dp" in thread.name for thread in threading.enumerate())


def test_what_a_thread_meets_is_raised_where_it_is_waited_for() -> None:
    background = Background("dp")

    def fails() -> None:
        raise ValueError("the other rank is gone")

    left: list[object] = []

    class Waiting(nullcontext[None]):
        def __exit__(self, *error: object) -> None:
            left.append(error[0])

    first, second = (background.take(Pending((), work), Waiting()) for work in (fails, lambda: None))
    with pytest.raises(ValueError, match="gone"):
        first.wait()
    assert left == [ValueError], "who notes that it was left must know that it failed"
    second.wait()
    del background


def test_threads_end_with_who_began_them() -> None:
    background = Background("alone")
    background.take(Pending(), nullcontext()).wait()
    assert any(thread.name == "exchanges along alone" for thread in threading.enumerate())
    del background
    assert not any(thread.name == "exchanges along alone" for thread in threading.enumerate())
