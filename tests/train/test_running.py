"""A job run in its folder: what is there already is gone on with, said to be done, or refused."""

from __future__ import annotations

import os
import zlib
from contextlib import suppress
from pathlib import Path

import pytest

from phalanx import WrongUse
from phalanx.run import Run
from phalanx.train import running
from phalanx.train.job import Job
from phalanx.train.resolving import resolve
from tests import tasks
from tests.checkpoints import manager_at, trained
from tests.forking import fork
from tests.tasks import Digits
from tests.test_cli import main, run_forked


def job_of(steps: int | None = None, **options: str) -> Job:
    return resolve(
        task=f"{Path(tasks.__file__)}:Digits", layout=None, on="local:1", assignments=[], steps=steps, config=None,
        device="cpu", **options,
    )  # fmt: skip


def test_a_new_run_does_not_go_on_from_anothers_checkpoints(tmp_path: Path) -> None:
    trained(Digits(), "dp=1", tmp_path / "checkpoints", None, 1)
    job = job_of(checkpoints=str(tmp_path / "checkpoints"))
    with pytest.raises(WrongUse, match=r"holds checkpoints already, up to step 1\. Go on from them with --resume"):
        running.train(job, tmp_path / "run")
    with (
        manager_at(tmp_path / "checkpoints").store.held(),
        pytest.raises(WrongUse, match="checkpoints is being trained by process"),
    ):
        running.train(job, tmp_path / "other", resume=True)


def refused_and_finished(tmp_path: Path) -> None:
    refused = job_of(init_from=str(tmp_path / "nothing"))
    assert running.train(refused, tmp_path / "new").exit_code in (2, 3)
    assert not (tmp_path / "new").exists()
    assert running.train(job_of(steps=1), tmp_path / "run").holds
    run = Run(tmp_path / "run")
    before = run.settings_path.read_bytes(), run.certificate_path.read_bytes()
    assert running.train(job_of(steps=1), run.path, resume=True).summary == f"{run.path} is finished"
    with pytest.raises(WrongUse, match=r"is finished at step 1\. Give --steps 2 or more"):
        running.train(job_of(steps=0), run.path, resume=True)
    assert (run.settings_path.read_bytes(), run.certificate_path.read_bytes()) == before


def test_what_was_refused_leaves_no_folder_and_changes_none(tmp_path: Path) -> None:
    process = fork(refused_and_finished, tmp_path)
    process.join()
    assert process.exitcode == 0


def test_hosts_that_meet_need_a_folder() -> None:
    job = job_of(meet="localhost:1", max_nodes=2)  # type: ignore[arg-type]
    with pytest.raises(WrongUse, match="Give it with --run"):
        running.train(job, None)


def test_bad_data_is_named_before_any_rank_starts(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed (the dev extra has it)")
    (tmp_path / "rows.jsonl").write_text('{"question": "a?", "answer": "b"}\n{"question": "c?"}\n')
    job = resolve(
        task="sft", layout=None, on="local:2", assignments=[f"path={tmp_path / 'rows.jsonl'}"], steps=1, config=None,
        device="cpu",
    )  # fmt: skip
    with pytest.raises(WrongUse, match=r"rows\.jsonl, row 2: "):
        running.train(job, tmp_path / "run")
    assert not (tmp_path / "run").exists()


SECRETIVE = """
import os
from dataclasses import dataclass, field
import phalanx
from tests.tasks import Digits

LITERAL = dict(smtp_pass="SECRET-literal")

@dataclass
class Mine(Digits):
    password: str = ""
    source: str = ""
    options: dict = field(default_factory=dict)
    how: str = ""

    def data(self):
        self.read_api_key = "SECRET-read"
        return super().data()

    def loss(self, output, batch):
        print("printed", self.password)
        if self.how == "raised" and phalanx.rows(output)[0] == 0:
            told = f"{self.password}, {self.source}, {self.options}, {self.read_api_key}"
            told += ", Authorization: Basic U0VDUkVUOmE="
            raise RuntimeError(told) from KeyError(os.environ["SOME_TOKEN"])
        return super().loss(output, batch)
"""
OPTIONS = '{"key": "SECRET-inner-1", "deep": [{"github_token": "SECRET-deep"}], "proxy": "http://me:SECRET-proxy@host"}'
"""A name that may mean something else, one in a list, and a URL."""


def all_of(folder: Path) -> bytes:
    """The names and contents of files, flight records unpacked."""
    found = b""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        with suppress(zlib.error):
            content += zlib.decompress(content)
        found += str(path).encode() + content
    return found


@pytest.mark.parametrize(("how", "ranks"), [("raised", 1), ("raised", 2), ("", 2)])
def test_secrets_of_a_task_are_nowhere(how: str, ranks: int, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SECRETIVE)
    words = [
        "train", "mine.py", "--unchecked", "--on", f"local:{ranks}", "--run", "run", "--steps", "2", "--log", "csv",
        *(word for setting in (
            "password=SECRET-password", "source=sftp://me:SECRET-url@host/x", f"options={OPTIONS}", f"how={how}",
        ) for word in ("--set", setting)),
    ]  # fmt: skip
    done = run_forked(_with_token, *words, cwd=tmp_path)
    assert done.returncode == bool(how), done.stderr
    assert b"SECRET" not in (done.stdout + done.stderr).encode()
    found = all_of(tmp_path / "run")
    assert b"SECRET" not in found
    assert b"U0VDUkVU" not in found
    assert b'password = "***"' in found
    assert "printed ***" in done.stdout
    if how:
        assert "RuntimeError: ***, sftp://me:***@host/x" in done.stderr
        again = run_forked(_with_token, "train", "--resume", "--run", "run", cwd=tmp_path)
        assert (again.returncode, "Give it again: --set password=..." in again.stderr) == (2, True)
    else:
        assert run_forked(_with_token, "report", "run", cwd=tmp_path).returncode == 0
        shown = run_forked(_with_token, "why", "run", "--json", cwd=tmp_path).stdout + all_of(tmp_path / "run").decode(
            errors="replace"
        )
        assert "SECRET" not in shown


def _with_token(*words: str) -> None:
    os.environ["SOME_TOKEN"] = "SECRET-environment"
    main(*words)
