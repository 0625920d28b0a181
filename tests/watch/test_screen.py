"""The screen: one line that renews itself on a terminal, quiet elsewhere."""

from __future__ import annotations

import io

import phalanx
from phalanx.watch.screen import Screen, memory_bytes
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
    live = text.split("\n")[5]
    assert live.startswith("\r")
    assert "step 6/6" in text
    assert "samples/s" in text
    assert "GiB" in text
    assert "left" in text


def test_elsewhere_it_is_quiet_but_for_the_facts() -> None:
    lines = show(io.StringIO()).splitlines()
    assert [line.split()[0] for line in lines] == ["layout", "model", "batch", "dtypes", "note", "held"]
    assert "parameter float32 | compute float32" in lines[3]
    assert "zero=2 has no effect" in lines[4]
