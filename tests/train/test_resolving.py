"""From words to a job: what is said goes before what a run says of itself, and what cannot be meant is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx import Layout, WrongUse
from phalanx.train.job import Job
from phalanx.train.resolving import resolve
from tests import tasks

DIGITS = f"{Path(tasks.__file__)}:Digits"
SETTINGS = f"""
[run]
task = "{DIGITS}"
layout = "fsdp=2,zero=2"
on = "local:2"
device = "cpu"
keep = 5

[settings]
steps = 4
"""


def job_of(**words: Any) -> Job:
    given = dict.fromkeys(("task", "layout", "on", "steps", "config", "device"))
    return resolve(**{**given, "assignments": [], **words})


def config_of(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_words_go_before_a_runs_own(tmp_path: Path) -> None:
    config = config_of(tmp_path, SETTINGS)
    repeated = job_of(config=config)
    assert (repeated.reference, repeated.task.steps, repeated.options.keep) == (DIGITS, 4, 5)
    assert (repeated.layout, repeated.cluster.world) == (Layout.parse("fsdp=2,zero=2"), 2)
    changed = job_of(config=config, steps=3, keep=7, layout="dp=1")
    assert (changed.task.steps, changed.options.keep) == (3, 7)
    assert (changed.layout, changed.cluster.world) == (Layout(), 1)


def test_a_run_that_goes_on_elsewhere_keeps_its_layout_as_far_as_can_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, SETTINGS)
    assert str(job_of(config=config, on="local:4", resume=True).layout) == "fsdp=4,zero=2"
    assert "the layout was fsdp=2,zero=2 and is fsdp=4,zero=2 on 4 ranks; --layout chooses" in capsys.readouterr().out
    assert "the layout was" not in str(job_of(config=config, on="local:2", resume=True)) + capsys.readouterr().out
    assert job_of(config=config, on="local:4").layout == Layout(dp=4)


def test_settings_that_a_run_does_not_say_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job_of(config=config_of(tmp_path, SETTINGS), resume=True)
    told = capsys.readouterr().out
    assert "does not say what global_batch is: it is 8 now" in told
    assert "what steps is" not in told


@pytest.mark.parametrize(
    ("text", "words", "told"),
    [
        (SETTINGS + "[more]\n", {}, "has a table 'more' that means nothing"),
        (SETTINGS.replace("keep", "kept"), {}, "has a key 'kept' that means nothing.*keep"),
        (SETTINGS.replace('"local:2"', "2"), {}, "on = 2 in .* is not text"),
        ("", {}, "names no task"),
        ("[settings]\nsteps = 1\n", {"resume": True}, "names no task"),
        ("[settings]\nsteps = 1\n", {}, "there is no task to train"),
        (SETTINGS, {"kill": "2@1"}, "would kill nobody: there are ranks 0 to 1 and 4 steps"),
        (SETTINGS, {"kill": "1@5"}, "would kill nobody"),
        (SETTINGS, {"layout": "dp=3", "on": "local:2"}, "3 ranks"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, text: str, words: dict[str, Any], told: str) -> None:
    with pytest.raises(WrongUse, match=told):
        job_of(config=config_of(tmp_path, text), **words)
