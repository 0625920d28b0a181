"""At the end of a run its profile is said, or why there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx import Run
from phalanx.train.options import Options
from phalanx.train.profile.telling import tell_profile
from tests.watch.test_trace import written
from tests.watch.test_trace_times import STEP


def test_what_was_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, 0, STEP)
    tell_profile(Options(profile="1:2"), Run(tmp_path), 6)
    assert "profile of steps 1 to 2 on 1 rank of 2" in capsys.readouterr().out
    tell_profile(Options(profile="1:2"), Run(tmp_path), 6)
    assert capsys.readouterr().out == (
        f"profile  steps 1 to 2 had been profiled before this start: {tmp_path}/profile/steps-1-2.txt\n"
    )


@pytest.mark.parametrize(
    ("profile", "done", "told"),
    [
        ("10:12", 5, "profile  nothing was profiled: the run ended after 5 steps, before step 10\n"),
        ("modules@10", 1, "profile  nothing was profiled: the run ended after 1 step, before step 10\n"),
        ("4", 9, "profile  nothing was profiled: step 4 came before this start, or could not be recorded\n"),
        (None, 5, ""),
        ("nvtx", 5, ""),
    ],
)
def test_nothing_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], profile: str | None, done: int, told: str
) -> None:
    tell_profile(Options(profile=profile), Run(tmp_path), done)
    assert capsys.readouterr().out == told


def test_a_disk_that_takes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, 0, STEP)
    (tmp_path / "profile" / "steps-1-2.txt").mkdir()  # in the place of the file
    tell_profile(Options(profile="1:2"), Run(tmp_path), 6)
    assert "the profile cannot be put together" in capsys.readouterr().out
