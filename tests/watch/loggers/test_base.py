"""What all loggers have in common: who writes, when, and what happens when nothing can be written."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import phalanx
from phalanx import WrongUse
from phalanx.run import Run
from phalanx.watch.loggers import CSV, Logger
from phalanx.watch.loggers.base import family, kept
from tests.tasks import Digits
from tests.test_cli import phalanx as command
from tests.watch.loggers.runs import TASK


def test_a_task_may_have_one_among_its_callbacks(tmp_path: Path) -> None:
    own = "    def callbacks(self):\n        return [phalanx.loggers.CSV(), phalanx.loggers.CSV(folder='elsewhere')]"
    (tmp_path / "task.py").write_text(TASK.format(more="", methods=own))
    done = command("train", "task.py", "--on", "local:2", "--steps", "3", "--run", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "logs  CSV: run/logs/metrics.csv, CSV: elsewhere/run/metrics.csv" in done.stdout
    first, second = (tmp_path / folder / "metrics.csv" for folder in ("run/logs", "elsewhere/run"))
    assert first.read_text().count("\n") == second.read_text().count("\n") == 4
    again = command("train", "task.py", "--steps", "3", "--run", "other/run", cwd=tmp_path)
    assert again.returncode == 2
    assert f"elsewhere/run has the logs of {tmp_path}/run. Give CSV another folder" in again.stderr
    done = command("prove", "task.py", "--layouts", "dp=2", "--run", "proof", "--unchecked", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert first.read_text().count("\n") == second.read_text().count("\n") == 4, "a proof is no run"


class Failing(Logger):
    title = "Nowhere"

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.calls = at, []  # type: ignore[var-annotated]

    def begin(self, run: Any) -> None:
        self.calls.append("begin")

    def write(self, step: int, numbers: Any) -> None:
        self.calls.append(step)
        if step == self.at:
            raise OSError("no room")

    def write_measures(self, step: int, measures: Any) -> None:
        self.calls.append(dict(measures))

    def end(self, finished: bool) -> None:
        self.calls.append(finished)


@pytest.mark.parametrize("at", [2, 9])
def test_training_goes_on_where_a_log_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], at: int
) -> None:
    failing = Failing(at)
    with phalanx.Engine(Digits(steps=3), "dp=1", device="cpu", run=Run(tmp_path)) as engine:
        engine.callbacks.add(failing)
        engine.callbacks.call("on_start", engine)
        for batch in engine.batches():
            engine.step(batch)
        engine.evaluate()
    if at == 2:
        assert failing.calls == ["begin", 1, 2, False], "it lets go of what it has"
        assert capsys.readouterr().err.count("Nowhere cannot be written to any more (OSError: no room); going on") == 1
    else:
        assert failing.calls[:4] == ["begin", 1, 2, 3]
        assert failing.calls[4].keys() == {"loss", "accuracy"}
        assert failing.calls[5] is False, "nobody has said that it is finished"


def test_without_a_run_a_folder_must_be_given(tmp_path: Path) -> None:
    with phalanx.Engine(Digits(steps=1), "dp=1", device="cpu") as engine:
        with pytest.raises(WrongUse, match=r"Give one: CSV\(folder=\.\.\.\)"):
            CSV().on_start(engine)
        own = CSV(folder=tmp_path / "mine")
        own.on_start(engine)
        own.on_step(engine, engine.step(next(engine.batches())))
        own.close()
    assert (tmp_path / "mine" / "metrics.csv").read_text().startswith("step,loss,grad_norm,")


class Told(Logger):
    title = "Told"

    def __init__(self) -> None:
        super().__init__()
        self.told: Any = None

    def begin(self, run: Any) -> None:
        self.told = run

    def write(self, step: int, numbers: Any) -> None: ...

    def write_measures(self, step: int, measures: Any) -> None: ...

    def end(self, finished: bool) -> None: ...


@dataclass
class Secretive(Digits):
    db_password: str = "swordfish"
    my_token: str = "swordfish"
    source: str = "sftp://me:swordfish@host/x"
    command: str = "fetch --token swordfish now"
    prompt: str = "say swordfish"
    options: dict[str, Any] = field(default_factory=lambda: {"key": "swordfish", "b": [{"auth": "swordfish"}], "c": 1})
    max_tokens: int = 128


def test_no_logger_has_a_secret(tmp_path: Path) -> None:
    told = Told()
    with phalanx.Engine(Secretive(steps=1), "dp=1", device="cpu", run=Run(tmp_path)) as engine:
        engine.callbacks.add(told)
        engine.callbacks.call("on_start", engine)
    assert "swordfish" not in str(told.told)
    assert told.told.settings["max_tokens"] == 128
    assert told.told.settings["db_password"] == "***"


def test_series_with_labels() -> None:
    assert family("loss") == ("loss", {})
    assert family("loss/a/b") == ("loss_part", {"name": "a/b"})
    assert family("seconds/forward") == ("seconds", {"phase": "forward"})
    assert family("attention/entropy") == ("logged", {"name": "attention/entropy"})


def test_what_is_kept_is_made_once(tmp_path: Path) -> None:
    assert [kept(tmp_path / "id", lambda: "one"), kept(tmp_path / "id", lambda: "two")] == ["one", "one"]
