"""The line of progress: on a terminal it renews itself and goes; elsewhere there is none."""

from __future__ import annotations

import io
import sys

import pytest

from phalanx.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_a_line_that_goes_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with progress() as show:
        show("reading", 3 << 20, 3 << 20)
    assert "\rreading: 3 of 3 MiB" in screen.getvalue()
    assert screen.getvalue().endswith("\r")


def test_elsewhere_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    with progress() as show:
        show("reading", 1, 1)
    assert capsys.readouterr() == ("", "")
