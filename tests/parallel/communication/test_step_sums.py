"""A rank's last steps, added up as they pass."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from phalanx.flight import (
    BYTES,
    COMPILED,
    COMPILING,
    DEVICE_WAITED,
    HAD,
    NUMBERS_A_STEP,
    ON_DEVICE,
    SPENT,
    STEPS,
    STEPS_AT,
    WAITED,
    WAITED_ALONG,
)
from phalanx.parallel.communication.step_sums import StepSums


@pytest.fixture
def memory() -> bytearray:
    return bytearray(BYTES)


def rows(memory: bytearray) -> np.ndarray:
    return np.frombuffer(memory, "<i8", STEPS * NUMBERS_A_STEP, STEPS_AT).reshape(STEPS, NUMBERS_A_STEP)


def test_what_passes_is_added_to_the_step_that_runs(memory: bytearray) -> None:
    sums = StepSums(memoryview(memory).cast("q"))
    sums.spent[2] += 100  # before the first step
    sums.along[5] += 100
    for step in (7, 8, 9):
        sums.begin(step)
        sums.spent[2] += 100 * step
        sums.spent[2] += 1
        sums.waited[2] += 40
        sums.along[5] += 40
        sums.on_device(1000 * step, 10)
    first, second = rows(memory)[[7, 8]]
    assert (first[0], first[SPENT + 2], first[WAITED + 2], first[WAITED_ALONG + 5]) == (8, 701, 40, 40)
    assert (second[0], second[SPENT + 2], second[WAITED_ALONG + 5]) == (9, 801, 40)
    assert (first[ON_DEVICE], first[DEVICE_WAITED]) == (7000, 10)
    sums.begin(7 + STEPS)  # takes the place of the first
    assert rows(memory)[7][0] == 8 + STEPS
    assert not rows(memory)[7][SPENT:].any()


def test_what_a_step_had_of_a_processor_and_compiled_is_known_when_the_next_begins(memory: bytearray) -> None:
    double = torch.compile(lambda numbers: numbers * 2, backend="eager", dynamic=False)
    sums = StepSums(memoryview(memory).cast("q"))
    sums.begin(0)
    double(torch.ones(3))
    double(torch.ones(4))
    sums.begin(1)
    time.sleep(0.2)
    sums.begin(2)
    compiled, slept = rows(memory)[[0, 1]]
    assert compiled[COMPILED] == 2
    assert compiled[COMPILING] > 0
    assert slept[COMPILED] == slept[COMPILING] == 0
    assert slept[HAD] < 0.1e9


def test_steps_that_were_undone_are_forgotten(memory: bytearray) -> None:
    sums = StepSums(memoryview(memory).cast("q"))
    for step in (4, 5, 6, 7, 5):
        sums.begin(step)
    assert sorted(rows(memory)[:, 0][rows(memory)[:, 0] > 0]) == [5, 6]
