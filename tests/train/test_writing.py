"""Files behind the steps: a disk that is full for a while costs nothing but the saves meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx import Run
from phalanx.checkpoint.verify import verify
from phalanx.train import writing
from phalanx.train.engine import Engine
from phalanx.train.policy import Policy
from tests.checkpoints import checkpointing, manager_at
from tests.tasks import Digits
from tests.test_cli import phalanx

TASK = '''
import shutil
from dataclasses import dataclass
from pathlib import Path
from tests.tasks import Digits


@dataclass
class Filling(Digits):
    """Fills the disk that it runs on, and makes room again."""

    calls = 0

    def inputs(self, batch):
        Filling.calls += 1
        ballast = Path("disk") / "ballast"
        if 12 <= Filling.calls < 30:
            with ballast.open("ab") as file:
                file.write(bytes(shutil.disk_usage("disk").free))
        elif Filling.calls == 30:
            ballast.unlink()
        return super().inputs(batch)
'''


def test_a_run_goes_on_while_its_disk_is_full(small_disk: Path) -> None:
    (small_disk / "filling.py").write_text(TASK)
    words = ["filling.py", "--steps", "40", "--save-steps", "5", "--run", "disk/run", "--unchecked"]
    done = phalanx("train", *words, cwd=small_disk)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("cannot be written: No space left on device; going on, events wait in memory") == 1
    assert done.stderr.count("rank-00000.jsonl can be written again") == 1
    assert done.stdout.count("could not be saved, going on") == 1
    assert done.stdout.count("checkpoints can be written again") == 1
    run = Run(small_disk / "disk" / "run")
    assert list(run.ledger()) == list(range(40)), "no event is missing"
    assert manager_at(run.checkpoints_path).steps() == [35, 40]
    assert verify(str(run.path)).holds


def test_a_save_that_failed_is_tried_again_before_the_next_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        Engine(Digits(steps=9), device="cpu") as engine,
        checkpointing(engine, tmp_path, Policy(steps=0, minutes=0, memory_steps=0)) as checkpointer,
    ):
        batches = engine.batches()

        def step() -> None:
            checkpointer.before_step()
            checkpointer.after_step(engine.step(next(batches)).signals, last=False)
            checkpointer.drain()

        with monkeypatch.context() as patch:
            patch.setattr(type(checkpointer.manager.store), "free", lambda store: 0)
            engine.signals.save = True
            step()
        step()
        assert manager_at(tmp_path).steps() == []
        monkeypatch.setattr(writing, "RETRY_SECONDS", 0.0)
        step()
        assert manager_at(tmp_path).steps() == [3]
        step()
    assert manager_at(tmp_path).steps() == [3]
