"""The verb `evaluate`: what it prints, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_cli import GOOD, phalanx


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated")
    (folder / "task.py").write_text(GOOD)
    done = phalanx("train", "task.py", "--run", "run", "--steps", "2", "--device", "cpu", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_it_prints_a_table(run: Path) -> None:
    done = phalanx("evaluate", "run", cwd=run.parent)
    assert done.returncode == 0, done.stderr
    first, *lines = done.stdout.splitlines()
    assert first == "run, step 2, held-out data, dp=1"
    assert [line.split()[0] for line in lines] == ["accuracy", "loss"]


@pytest.mark.parametrize(("words", "said"), [
    (["--checkpoint", "5"], "there is no checkpoint of step 5. Choose --checkpoint from: 2."),
    (["--data", "other"], "--data other is not known. Choose one of: held-out, training."),
    (["--judge", "x.py:y"], "the judge's file x.py is not there"),
    (["--answers", "-1"], "--answers -1 is no number of answers"),
    (["--follow", "--json"], "Leave --checkpoint and --json out"),
    (["--set", "global_batch=0"], "global_batch"),
])  # fmt: skip
def test_what_cannot_be_is_said(words: list[str], said: str, run: Path) -> None:
    done = phalanx("evaluate", "run", *words, cwd=run.parent)
    assert done.returncode == 2
    assert said in done.stderr
