"""Pending: what follows a collective is launched once, and waited for."""

from __future__ import annotations

from phalanx.parallel.communication.pending import Pending


def test_what_follows_is_done_once_and_in_order() -> None:
    done: list[str] = []

    def first() -> Pending:
        done.append("first")
        return Pending(finish=lambda: done.append("second"))

    pending = Pending(finish=first)
    assert not pending.over
    pending.advance()
    assert done == ["first"]
    pending.wait()
    pending.wait()
    assert done == ["first", "second"]
    assert pending.over
