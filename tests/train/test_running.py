"""A job run in its folder: what is there already is gone on with, said to be done, or refused."""

from __future__ import annotations

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
