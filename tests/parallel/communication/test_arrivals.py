"""Arrivals: collectives that a GPU has come to, counted without waiting for it."""

from __future__ import annotations

import threading

import pytest
import torch

from phalanx.parallel.communication.arrivals import Arrivals


class Event:
    """As a GPU's, which passes when it is told to."""

    passed = False

    def record(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


def test_what_was_launched_counts_when_the_device_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)  # looked at here instead
    events: list[Event] = []
    told: list[int] = []
    signs = memoryview(bytearray(24)).cast("q")
    arrivals = Arrivals(signs, told.append, lambda: events.append(Event()) or events[-1])
    for record in (5, 6, 7):
        arrivals.launching(record)
    assert signs.tolist() == [0, 3, 0]
    events[1].passed = True  # not before the first
    arrivals.look()
    assert signs.tolist() == [0, 3, 0]
    events[0].passed = True
    arrivals.look()
    assert (signs.tolist(), told) == ([2, 1, 0], [5, 6])
    arrivals.launching(8)
    assert len(events) == 3  # one that has passed is used again
    assert signs.tolist() == [2, 2, 0]


@pytest.mark.gpu
def test_a_gpu_that_is_busy_has_not_arrived() -> None:
    signs = memoryview(bytearray(24)).cast("q")
    arrivals = Arrivals(signs, lambda record: None)
    arrivals._thread = threading.current_thread()
    torch.cuda._sleep(2_000_000_000)
    arrivals.launching(0)
    arrivals.look()
    assert signs.tolist() == [0, 1, 0]
    torch.cuda.synchronize()
    arrivals.look()
    assert signs.tolist() == [1, 0, 0]
