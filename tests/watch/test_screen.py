"""The screen: one line that renews itself on a terminal, quiet elsewhere."""

from __future__ import annotations

import io
from dataclasses import dataclass, field

import pytest
import torch

from phalanx.watch import screen as screen_room
from phalanx.watch.screen import Screen, memory_bytes

CPU = torch.device("cpu")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@dataclass
class Stepped:
    step: int
    loss: float = 1.5
    losses: dict[str, float] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)
    turn: str = ""
    skipped: bool = False
    count: float = 80.0
    slots: int = 8
    flops: float = 0.0


def show(out: io.StringIO) -> str:
    screen = Screen(6, "samples", CPU, out)
    screen.table({"layout": "dp=1", "memory": "1 KiB"}, ["zero=2 has no effect"])
    for step in range(6):
        screen.step(Stepped(step))
    screen.evaluation(5, {"loss": 0.5})
    return out.getvalue()


def test_a_terminal_gets_one_live_line() -> None:
    text = show(Terminal())
    assert text.split("\n")[3].startswith("\r")
    assert text.count("\n") == 5
    for word in ("step 6/6", "samples/s on average", "GiB"):
        assert word in text
    assert memory_bytes(CPU) > 1 << 20


def test_elsewhere_it_is_a_line_every_so_many_steps() -> None:
    lines = show(io.StringIO()).splitlines()
    assert lines[:3] == [" layout  dp=1", " memory  1 KiB", "   note  zero=2 has no effect"]
    assert [line.split()[2] for line in lines[3:9]] == [f"{step}/6" for step in range(1, 7)]
    assert lines[9] == "held out after step 6: loss 0.5000"


def test_a_line_every_so_many_steps_and_no_others() -> None:
    for out, others in ((io.StringIO(), 0), (Terminal(), 1)):
        screen = Screen(100, "samples", CPU, out, every=30)
        for step in range(100):
            screen.step(Stepped(step))
        lines = [line for line in out.getvalue().split("\n") if line]
        assert [line.split("\r")[-1].split()[2] for line in lines] == ["30/100", "60/100", "90/100", "100/100"]
        assert ("\r" in out.getvalue()) == bool(others)


def test_quiet_is_all_but_what_is_noted() -> None:
    screen = Screen(6, "samples", CPU, out := io.StringIO(), quiet=True)
    screen.table({"layout": "dp=1"}, ["zero=2 has no effect"])
    screen.resumed("files", 3)
    for step in range(6):
        screen.step(Stepped(step))
    screen.evaluation(5, {"loss": 0.5})
    screen.note("the loss needs all micro-batches")
    assert out.getvalue().splitlines() == [
        "   note  zero=2 has no effect",
        "   note  the loss needs all micro-batches",
    ]


def test_a_few_numbers_of_the_task_stand_on_the_line() -> None:
    screen = Screen(2, "samples", CPU, out := io.StringIO())
    screen.step(Stepped(0, logged={"accuracy": 0.5, "reward": 12345.678}))
    screen.step(Stepped(1, logged=dict.fromkeys("abcd", 0.5)))
    first, second = out.getvalue().splitlines()
    assert "loss 1.5000  accuracy 0.5  reward 1.235e+04  " in first
    assert "loss 1.5000  " in second
    assert "0.5 " not in second


def test_a_long_run_has_about_twenty_lines() -> None:
    screen = Screen(1000, "samples", CPU, out := io.StringIO())
    for step in range(1000):
        screen.step(Stepped(step))
    assert [line.split()[2] for line in out.getvalue().splitlines()] == [f"{n}/1000" for n in range(50, 1001, 50)]


@pytest.mark.parametrize(("counts", "rate"), [("samples", "16 samples/s"), ("tokens", "160 tokens/s")])
def test_rate_and_time_left_are_of_the_same_steps(counts: str, rate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(screen_room.time, "monotonic", lambda: now)
    screen = Screen(1000, counts, CPU, out := io.StringIO())
    for step in range(100):
        now += 10.0 if step < 40 else 0.5  # slow at first: it compiles, or reads
        screen.step(Stepped(step))
    last = out.getvalue().splitlines()[-1]
    assert "step 100/1000" in last
    assert rate in last  # 8 samples, or 80 tokens, a step of half a second
    assert "7 min 30 s left" in last  # 900 steps of that


def test_the_rate_is_of_recent_steps_and_the_last_line_has_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(screen_room.time, "monotonic", lambda: now)
    screen = Screen(20, "samples", CPU, out := io.StringIO())
    for step in range(20):
        now += 60.0 if step == 0 else 4.0 if step < 10 else 2.0
        screen.step(Stepped(step))
    lines = out.getvalue().splitlines()
    assert " 0 samples/s  " in lines[0]
    assert " 2 samples/s  " in lines[1], "the first step, which begins the run, counts"
    assert " 2 samples/s  " in lines[9]
    assert " 4 samples/s  " in lines[15], "steps of half a minute ago count"
    assert lines[19].endswith(" GiB")
    assert " 3 samples/s on average  " in lines[19]  # 19 steps of 8 samples in 56 seconds
    assert "left" in lines[18]


def test_losses_by_name_and_by_turn() -> None:
    screen = Screen(4, "samples", CPU, out := io.StringIO())
    screen.step(Stepped(0, turn="critic"))
    screen.step(Stepped(1, turn="actor", skipped=True))
    screen.step(Stepped(2, losses={"a": 1.0, "b": 0.5}))
    first, second, third = out.getvalue().splitlines()
    assert "critic 1.5000" in first
    assert "critic 1.5000  actor skipped: not finite" in second
    assert "loss 1.5000 (a 1.0000, b 0.5000)" in third


def test_a_reader_that_left_does_not_end_the_training() -> None:
    out = io.StringIO()
    screen = Screen(4, "samples", CPU, out)
    out.close()
    screen.step(Stepped(0))
    screen.note("nobody reads this")
    assert not screen.open


def test_what_the_device_computes_is_shown_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr("time.monotonic", lambda: float(next(now)))
    for peak, told in ((None, "2 TFLOP/s  "), (8e12, "2 TFLOP/s, MFU 25.0%  ")):
        screen = Screen(4, "samples", CPU, out := io.StringIO(), every=2, peak=peak)
        for step in range(4):
            screen.step(Stepped(step, flops=2e12 * (step > 1)))
        first, second = out.getvalue().splitlines()
        assert "TFLOP" not in first
        assert told in second
