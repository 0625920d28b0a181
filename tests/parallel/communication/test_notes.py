"""What is noted of collectives and phases, by the plain twin: the compiled one is held against it elsewhere."""

from __future__ import annotations

from itertools import count

import torch

from phalanx.flight import BYTES, MAGIC, Flight
from phalanx.parallel.communication.notes import Notes
from phalanx.parallel.communication.places import Places
from phalanx.parallel.communication.step_sums import StepSums


def test_a_collective_has_its_moments_and_a_step_its_sums() -> None:
    memory = bytearray(BYTES)
    memory[:8] = MAGIC
    view = memoryview(memory)
    sums = StepSums(view.cast("q"))
    notes = Notes(view, Places(view), sums, count(100, 10).__next__)  # 100: it begins
    notes.step = 5
    assert notes.doing("forward") == "start-up"  # 110
    first = notes.launched("g", "dp", 2, "all-reduce", torch.ones(3, 2))  # 120
    second = notes.launched("g", "dp", 2, "all-gather", torch.ones(()))  # 130
    notes.waiting(first)  # 140
    notes.left(first)  # 150
    notes.waiting(second)  # 160
    notes.left(second)  # 170
    assert notes.doing("backward") == "forward"  # 180
    record = Flight.of(bytes(memory))
    one, other = (record.launch(each) for each in record.collectives)
    assert (one.entered, one.waiting, one.left, one.step, one.phase) == (120, 140, 150, 5, "forward")
    assert (one.content, other.content) == ("float32 [3, 2]", "float32 []")
    assert one.place.startswith("tests/parallel/communication/test_notes.py:")
    assert (record.groups["g"].launched, record.groups["g"].arrived, record.first) == (2, 2, 5)
    assert (sums.spent[2], sums.waited[2], sums.along[0]) == (70, 20, 20)
    assert sums.beside[0] == 20 + 10  # what the first waited counts once


def test_a_record_whose_place_is_anothers_is_left_alone() -> None:
    view = memoryview(bytearray(BYTES))
    notes = Notes(view, Places(view), StepSums(view.cast("q"), ""), count(100, 10).__next__)
    first = notes.launched("g", "dp", 2, "all-reduce", torch.ones(1))
    for _ in range(5000):
        notes.doing("data")
    before = bytes(view)
    notes.waiting(first)
    notes.arrived(first)
    notes.left(first)
    assert bytes(view) == before
