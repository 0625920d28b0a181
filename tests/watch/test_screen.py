"""The screen: one line that renews itself on a terminal, quiet elsewhere."""

from __future__ import annotations

import io

import pytest
from torch import nn

import phalanx
from phalanx.watch import screen as screen_room
from phalanx.watch.screen import Screen, memory_bytes
from tests.ranks import Ranks
from tests.tasks import Digits


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(out: io.StringIO) -> str:
    with phalanx.Engine(Digits(), phalanx.Layout(zero=2), device="cpu") as engine:
        screen = Screen(engine, out)
        screen.start()
        for batch in engine.batches():
            screen.step(engine.step(batch))
        screen.evaluation(5, {"loss": 0.5})
        assert memory_bytes(engine.device) > 1 << 20
    return out.getvalue()


def test_a_terminal_gets_one_live_line() -> None:
    text = show(Terminal())
    live = text.split("\n")[6]
    assert live.startswith("\r")
    assert "step 6/6" in text
    assert "samples/s" in text
    assert "GiB" in text
    assert "left" in text


def test_elsewhere_it_is_a_line_every_so_many_steps() -> None:
    lines = show(io.StringIO()).splitlines()
    facts = ["layout", "model", "memory", "batch", "dtypes", "note"]
    assert [line.split()[0] for line in lines[:6]] == facts
    assert "parameter float32 | compute float32" in lines[4]
    assert "zero=2 has no effect" in lines[5]
    assert [line.split()[2] for line in lines[6:12]] == [f"{step}/6" for step in range(1, 7)]
    assert lines[12].startswith("held out")


def test_a_long_run_has_about_twenty_lines() -> None:
    with phalanx.Engine(Digits(steps=1000), device="cpu") as engine:
        screen, metrics = Screen(engine, out := io.StringIO()), engine.step(next(engine.batches()))
        for step in range(1000):
            metrics.step = step
            screen.step(metrics)
    assert [line.split()[2] for line in out.getvalue().splitlines()] == [f"{n}/1000" for n in range(50, 1001, 50)]


def test_rate_and_time_left_are_of_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(screen_room.time, "monotonic", lambda: now)
    with phalanx.Engine(Digits(steps=1000), device="cpu") as engine:
        metrics = engine.step(next(engine.batches()))
        screen = Screen(engine, out := io.StringIO())
        for step in range(100):
            now += 10.0 if step < 40 else 0.5  # slow at first: it compiles, or reads
            metrics.step = step
            screen.step(metrics)
    last = out.getvalue().splitlines()[-1]
    assert "step 100/1000" in last
    assert "16 samples/s" in last  # 8 a step of half a second
    assert "7:30 left" in last  # 900 steps of that


class Frozen(Digits):
    def model(self) -> nn.Module:
        model = super().model()
        model[0].requires_grad_(False)
        return model


def test_what_is_said_of_frozen_weights_and_of_one() -> None:
    with phalanx.Engine(Frozen(), device="cpu") as engine:
        Screen(engine, out := io.StringIO()).start()
    text = out.getvalue()
    assert "131 weights, 51 of them trainable" in text
    assert "dp=1 on 1 rank, CPU" in text
    assert "8 samples as 1 micro-batch a step" in text
    assert "weights 524 B, gradients 204 B, optimizer 408 B" in text
    for word in ("detection", "1 micro-batches", "x cpu", " 1 weights"):
        assert word not in text


def shards() -> str:
    with phalanx.Engine(Frozen(), "fsdp=2", device="cpu") as engine:
        Screen(engine, out := io.StringIO()).start()
    return out.getvalue()


def test_frozen_weights_are_updated_by_nobody(ranks: Ranks) -> None:
    told = ranks(2, shards)[0]
    assert "34 of them updated by rank 0" in told  # 2 rows of 3, 16 wide, and 2 biases
