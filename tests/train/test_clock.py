"""Seconds by phase: phases begin where they are said to, evaluations are none, and who watches is told."""

from __future__ import annotations

import time

import pytest
import torch

from phalanx.train.clock import Clock


def test_each_phase_has_its_time_and_watchers_are_told() -> None:
    clock, told = Clock(torch.device("cpu")), []
    clock.watchers.append(told.append)
    with clock.beside("data"):
        pass
    clock.start("forward")
    clock.begin("forward")  # goes on
    time.sleep(0.02)
    clock.begin("backward")
    time.sleep(0.01)
    clock.begin("forward")
    time.sleep(0.01)
    found = clock.seconds()
    assert found["forward"] == pytest.approx(0.03, abs=0.02)
    assert found["backward"] == pytest.approx(0.01, abs=0.01)
    assert told == ["data", "", "forward", "backward", "forward", ""]
    assert clock.seconds() == {}


def test_between_two_steps_there_is_no_phase() -> None:
    clock, told = Clock(torch.device("cpu")), []
    clock.watchers.append(told.append)
    clock.begin("wait")
    clock.begin("forward")
    assert told == []
    assert clock.seconds() == {}


def test_a_step_that_failed_leaves_nothing() -> None:
    clock = Clock(torch.device("cpu"))
    clock.start("forward")
    clock.begin("backward")
    clock.start("forward")
    assert set(clock.seconds()) == {"forward"}


def test_phases_of_a_graph_are_counted_whenever_it_is_replayed() -> None:
    clock = Clock(torch.device("cpu"))
    clock.start("forward")
    with clock.recording() as noted:
        clock.begin("backward")
        time.sleep(0.01)
        clock.begin("reduce")
    assert [phase for phase, _ in noted] == ["backward", "reduce"]
    for _ in range(2):
        clock.replayed(noted)
        clock.begin("update")
        assert clock.seconds()["backward"] == pytest.approx(0.01, abs=0.009)
        clock.start("forward")


def test_who_comes_later_watches() -> None:
    clock = Clock(torch.device("cpu"), lambda phase: None)
    assert not clock.is_watched
    clock.watchers.append(lambda phase: None)
    assert clock.is_watched
