"""Requests to stop: noted and never lost, handed on to ranks, and given time.

Schedulers repeat their signals, and a terminal gives one to everybody in it. So the first one asks, and all that follow
ask for the same thing: only a second Ctrl-C of a person at a terminal means that nothing is to be waited for.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a job to end: Ctrl-C, a scheduler's, a terminal that was closed."""
HANDED_ON = (*ENDING, signal.SIGUSR1)
GRACE = 30.0
"""Seconds that ranks have to save in, where nothing else is asked for."""
PERSON_SECONDS = 0.5
"""Between two Ctrl-C of a person; what starts us may hand on the one that it got too, and does so sooner."""

Handler = Callable[[int, FrameType | None], Any]


def heeded(numbers: Iterable[int]) -> list[int]:
    """Those of these signals that are to be handled: under ``nohup`` a closed terminal means nothing."""
    return [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]


@contextmanager
def handled(numbers: Iterable[int], handler: Handler) -> Iterator[None]:
    """Meanwhile these signals call a handler, those aside that mean nothing here."""
    before = {number: signal.signal(number, handler) for number in heeded(numbers)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


class Stop:
    """Whether a job was asked to stop, until when its ranks may save, and whether a person gave up waiting."""

    def __init__(self, grace: float, at_stake: Callable[[], bool] = lambda: True) -> None:
        """``grace``: seconds that ranks have to end well, where anything is ``at_stake`` that is not saved."""
        self.grace, self.at_stake = grace, at_stake
        self.deadline = math.inf
        self.given = 0.0
        self.cut_short = ""
        """Why ranks were not given all the time they needed, if they were not."""
        self._by_hand: float | None = None

    @property
    def asked(self) -> bool:
        return self.deadline < math.inf

    @property
    def left(self) -> float:
        """Seconds."""
        return max(0.0, self.deadline - time.monotonic()) if self.asked else 0.0

    def heard(self, number: int) -> bool:
        """A signal came; whether it is the first that asks to end."""
        if number == signal.SIGUSR1:
            return False
        now = time.monotonic()
        first = not self.asked
        if first:
            self.given = self.grace if self.at_stake() else 0.0
            self.deadline = now + self.given
        if number == signal.SIGINT and at_a_terminal():
            if self._by_hand is not None and now - self._by_hand > PERSON_SECONDS:
                self.deadline, self.cut_short = now, "by a second Ctrl-C"
            self._by_hand = self._by_hand or now
        return first

    def told(self) -> str:
        """For people, when it was asked."""
        again = "; Ctrl-C again ends it at once" if self._by_hand is not None else ""
        return f"   stop  was asked to: ranks save what they have done and end, within {self.grace:g} s{again}"


def at_a_terminal() -> bool:
    """Whether a person may be at the keyboard: this process is in the foreground of a terminal."""
    for stream in (sys.stdin, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            if os.tcgetpgrp(stream.fileno()) == os.getpgrp():
                return True
    return False


# On a rank.


@dataclass
class Requests:
    """What signals have asked a rank for, to be done after a step."""

    stop: bool = False
    """Save and stop."""
    save: bool = False


_requests = Requests()


def note_requests() -> None:
    """From a rank's first moment on: SIGTERM asks it to save and stop, SIGUSR1 to save."""
    for number in (signal.SIGINT, signal.SIGHUP):  # they reach the whole terminal; the warm process decides
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: setattr(_requests, "stop", True))
    signal.signal(signal.SIGUSR1, lambda number, frame: setattr(_requests, "save", True))


def give_requests(to: Requests) -> None:
    """From now on they are noted here, those that were noted before too."""
    global _requests
    before, _requests = _requests, to
    to.stop |= before.stop
    to.save |= before.save
