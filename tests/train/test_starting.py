"""From options to a verdict: what would be submitted is described, and what a place is asked for is checked first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tasks
from tests.test_cli import phalanx

DIGITS = f"{Path(tasks.__file__)}:Digits"


def test_what_would_be_submitted_is_shown_without_a_cluster(tmp_path: Path) -> None:
    on = ("--layout", "fsdp=8", "--on", "slurm:nodes=2,gpus=4", "--save-steps", "5", "--set", "steps=4")
    done = phalanx("train", DIGITS, *on, "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --gpus-per-node=4" in done.stdout
    assert f"train {DIGITS} --layout fsdp=8 --set steps=4 --save-steps 5 --device cuda --run" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--layout", "dp=3", "--on", "slurm:nodes=2"], "needs 3 ranks and there are 2"),
        (["--on", "slurm:nodes=2", "--set", "wdith=3"], "did you mean 'width'"),
        (["--on", "slurm:nodes=9"], "global_batch=8 is less than the 9 ranks"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, words: list[str], told: str) -> None:
    done = phalanx("train", DIGITS, *words, "--dry-run", cwd=tmp_path)
    assert done.returncode == 2
    assert told in done.stderr
    assert not list(tmp_path.iterdir())
