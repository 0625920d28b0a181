"""A collective that was launched: told while it is waited for, and not left where it fails."""

from __future__ import annotations

import pytest
import torch

from phalanx.flight import BYTES, Flight
from phalanx.parallel.communication.recorder import FlightRecorder
from phalanx.parallel.communication.traffic import Traffic


def test_one_that_fails_is_not_left_and_no_longer_waited_for() -> None:
    memory = bytearray(BYTES)
    traffic = Traffic(recorder=FlightRecorder(memoryview(memory), 0, 2, 1))
    seen: list[list[int]] = []
    for fails in (False, True):
        one = traffic.launched("g", "dp", 2, "all-reduce", torch.ones(3), 1)
        with pytest.raises(RuntimeError) if fails else one:
            if fails:
                with one:
                    seen.append(list(traffic.signs))
                    raise RuntimeError("gone")
    assert seen == [[2, 0, 1]]
    assert list(traffic.signs) == [2, 0, 0]
    inside = Flight.of(bytes(memory)).inside()
    assert inside is not None
    assert inside.name == "all-reduce 2 on dp"
