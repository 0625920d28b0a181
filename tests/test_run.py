"""The run's folder: settings that read back, events that survive a kill, names that do not collide."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from phalanx import Run, WrongUse
from phalanx.events import EventLog
from phalanx.run import FolderHeld, read_settings
from tests.test_cli import main, run_forked


def test_settings_read_back(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "one", "unused")
    settings = {
        "run": {"task": 'a "quoted" \\ name'},
        "settings": {"a": 1, "b": 2.5e-9, "c": True, "d": [1, 2], "e": "ü"},
    }
    run.write_settings(settings | {"more": {"none": None, "inf": math.inf}})
    assert run.settings() == settings | {"more": {"inf": math.inf}}


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path) -> None:
    Run.create(tmp_path / "one", "x").write_settings({})
    with pytest.raises(WrongUse, match="holds a run already"):
        Run.create(tmp_path / "one", "x")


def test_new_runs_get_names_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [Run.create(None, "gpt").path.name for _ in range(3)] == ["gpt-001", "gpt-002", "gpt-003"]


def test_settings_that_are_missing_or_broken_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="is not there"):
        read_settings(tmp_path / "run.toml")
    (tmp_path / "run.toml").write_text("a = ")
    with pytest.raises(WrongUse, match="not valid TOML"):
        read_settings(tmp_path / "run.toml")


def test_a_run_that_is_not_there_has_no_events(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="tpyo is not there"):
        Run(tmp_path / "tpyo").events(0)
    with pytest.raises(WrongUse, match="tpyo is not there"):
        Run(tmp_path / "tpyo").ledger()
    assert list(Run.create(tmp_path / "one", "x").events(7)) == [], "a rank that wrote nothing"


@pytest.mark.parametrize("content", ["", "4", "\0\0\0"])
def test_the_number_of_the_last_generation_is_found_again(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.create(tmp_path / "one", "x")
    with EventLog(run, 0) as log:
        for generation in (3, 7):
            log.write("start", step=0, generation=generation)
    assert run.generation() == 7
    (run.path / "generation").write_text(content)
    assert run.generation() == (4 if content == "4" else 7)
    assert ("generation is damaged" in capsys.readouterr().err) == (content != "4")
    assert run.next_generation(at_least=20) == 20


@pytest.mark.parametrize("purpose", ["", "for the rendezvous at node1:29400"])
def test_whoever_holds_a_folder_says_what_for(tmp_path: Path, purpose: str) -> None:
    run = Run.create(tmp_path / "one", "x")
    with (
        run.held(purpose=purpose),
        pytest.raises(FolderHeld, match=r"is being trained by process \d+ on") as refused,
        run.held(),
    ):
        pass
    assert refused.value.purpose == purpose
    assert FolderHeld(tmp_path, "").purpose == ""


def test_the_newest_step_is_found_at_the_end_of_the_events(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.last_step() is None
    with EventLog(run, 0) as log:
        log.write("start", step=0)
        assert run.last_step() is None
        for step in range(2000):
            log.write("step", step=step, loss=float(step), samples="0" * 16)
        log.write("checkpoint", step=2000)
    with run.events_path(0).open("a") as file:
        file.write('{"kind": "step", "step": 2000, "lo')
    found = run.last_step()
    assert found is not None
    assert found["step"] == 1999


LOGGED = """
from dataclasses import dataclass
import phalanx
from tests.tasks import Digits

@dataclass
class Mine(Digits):
    evaluate_every: int = 2

    def loss(self, output, batch):
        phalanx.log("accuracy", (output.argmax(1) == batch["y"]).float().mean())
        return phalanx.losses.cross_entropy(output, batch["y"])
"""


def _main(umask: int, *words: str) -> None:
    os.umask(umask)
    main(*words)


@pytest.mark.parametrize("umask", [0o022, 0o000, 0o077])
def test_all_that_a_run_leaves_is_for_its_owner_and_their_group(umask: int, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LOGGED)
    (tmp_path / "bad.py").write_text(LOGGED.replace('phalanx.log("accuracy", ', "raise ValueError("))
    logs = ["--log", "csv", "--log", "tensorboard", "--profile", "2:3", "--save-steps", "2"]

    def phalanx(*words: str, code: int = 0) -> None:
        done = run_forked(_main, umask, *words, cwd=tmp_path)
        assert done.returncode == code, done.stdout + done.stderr

    words = ["--on", "local:2", "--steps", "5", "--kill", "1@4", "--memory-steps", "1", *logs, "--run", "r"]
    phalanx("train", "mine.py", *words)
    phalanx("evaluate", "r")
    phalanx("report", "r")
    phalanx("train", "bad.py", "--unchecked", "--run", "s", code=1)
    phalanx("prove", "mine.py", "--layouts", "dp=2", "--run", "t")
    found = [tmp_path / name for name in "rst"] + [path for name in "rst" for path in (tmp_path / name).rglob("*")]
    most = {True: 0o750 & ~umask, False: 0o640 & ~umask}
    wrong = {str(path): oct(mode) for path in found if (mode := path.stat().st_mode & 0o777) != most[path.is_dir()]}
    assert not wrong
    names = {path.name for path in found}
    assert {"report.html", "proof.json", "junit.xml", "manifest.json", "certificate.json", "verdict.json"} <= names
    assert {"metrics.csv", "evaluations.jsonl", "origin.json", "rank-00001", "flops.json", "lock"} <= names
    assert {path.suffix for path in found} >= {".gz", ".safetensors", ".jsonl", ".txt", ".0"}
