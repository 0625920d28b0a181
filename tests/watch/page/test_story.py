"""What is told of a run beside its numbers."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from phalanx.run import Run, held
from phalanx.verdict import Verdict
from phalanx.watch.page import story
from phalanx.watch.page.table import RunTable
from phalanx.watch.why import why
from tests.watch.page.folders import append, start, step, write


@pytest.fixture
def table(tmp_path: Path) -> RunTable:
    run, draw = write(tmp_path / "run", 2, 30, width=64), random.Random(0)
    append(run, 0, {"kind": "checkpoint", "time": 1.7949e9 + 2, "step": 20, "path": "x", "seconds": 0.1})
    append(
        run, 1, {"kind": "failure", "time": 1.7949e9 + 4, "reason": "was ended by SIGKILL", "step": 30, "generation": 1}
    )
    for rank in (0, 1):
        append(run, rank, start(rank, 2, 20, 2), *(step(rank, n, draw) for n in range(20, 26)))
    found = RunTable(run)
    found.refresh()
    return found


def test_how_it_stands_by_its_events(table: RunTable) -> None:
    assert story.standing(table.run, table).startswith(
        "ended: 26 steps of 30 done on 2 ranks, started again once; last failure: rank 1 was"
    )
    with table.run.held():
        assert story.standing(table.run, table).startswith("running: 26 steps")
    table.run.certificate_path.parent.mkdir()
    table.run.certificate_path.write_text('{"steps": 26, "code": "abc"}')
    assert story.standing(table.run, table).startswith("done: ")


def test_the_verdict_is_that_of_why(table: RunTable, monkeypatch: pytest.MonkeyPatch) -> None:
    said = story.verdict(table.run)
    assert (said["holds"], said["summary"]) == (False, why(table.run).summary)

    def broken(run: Run) -> Verdict:
        raise OSError("the disk is gone")

    monkeypatch.setattr(story, "why", broken)
    said = story.verdict(table.run)
    assert said["summary"] == "ended; why it stands so could not be found"
    assert said["evidence"] == ["OSError: the disk is gone"]


def test_a_start_that_did_nothing_is_told_before_what_came_before_it(tmp_path: Path) -> None:
    run, draw = write(tmp_path / "run", 1, 20), random.Random(2)
    table = RunTable(run)
    table.refresh()
    (run.path / "generation").write_text("1\n")
    assert story.unheard(run, table) == ""
    (run.path / "generation").write_text("2\n")
    assert story.unheard(run, table) == "The newest start, generation 2, ended before its first step."
    append(run, 0, start(0, 1, 20, 2) | {"time": 1.7949e9 + 99})
    table.refresh()
    assert story.unheard(run, table) == "The newest start, generation 2, ended before its first step."
    with held(run.path):
        assert story.unheard(run, table) == "The newest start, generation 2, has done no step yet."
    append(run, 0, step(0, 20, draw) | {"time": 1.7949e9 + 100})
    table.refresh()
    assert story.unheard(run, table) == ""


def test_marks_are_where_things_happened(table: RunTable) -> None:
    found = {mark["kind"]: mark for mark in story.marks(table)}
    assert found.keys() == {"checkpoint", "failure", "restart"}
    assert (found["checkpoint"]["step"], found["failure"]["step"], found["restart"]["step"]) == (20, 30, 20)
    assert found["failure"]["words"] == "failed: was ended by SIGKILL"
    assert found["restart"]["words"] == "went on after step 20 from memory, generation 2"
    append(table.run, 0, {"kind": "failure", "time": 1.7949e9 + 0.12 * 12 + 0.11, "reason": "ValueError: x"})
    table.refresh()
    raised = next(mark for mark in story.marks(table) if mark["words"].endswith("ValueError: x"))
    assert abs(raised["step"] - 13) <= 1, "by its time"


def test_facts_and_the_list(table: RunTable) -> None:
    found = json.loads(json.dumps(story.facts(table.run, table)))
    assert found["settings"] == {"run.task": "gpt", "run.layout": "fsdp=2", "steps": "30", "seed": "0", "width": "64"}
    assert (found["steps"], found["planned"], found["ranks"], found["certificate"]) == (26, 30, 2, None)
    assert found["again"] == f"phalanx train --config {table.run.settings_path}"
    listed = story.brief(table.run)
    assert (listed["steps"], listed["state"], listed["layout"]) == (26, "ended", "fsdp=2")
    assert listed["loss"] == table.run.ledger()[25]["loss"]
    (table.run.path / "run.toml").write_text("no toml")
    assert story.facts(table.run, table)["settings"] == {}, "a page that shows the rest is worth more than none"


def test_its_proof_or_that_of_the_same_code_beside_it(table: RunTable, tmp_path: Path) -> None:
    beside = [tmp_path / name for name in ("run", "old", "proven", "gone")]
    assert story.proof(table.run, beside) is None
    table.run.certificate_path.parent.mkdir()
    table.run.certificate_path.write_text('{"steps": 26, "code": "abc"}')
    for name, code in (("old", "other"), ("proven", "abc")):
        (tmp_path / name).mkdir()
        proof = {"class": "GPT", "code": code, "results": [{"layout": "fsdp=2", "verdict": "equal"}]}
        (tmp_path / name / "proof.json").write_text(json.dumps(proof))
    found = story.proof(table.run, beside)
    assert found is not None
    assert (found["from"], found["results"]) == ("proven", [{"layout": "fsdp=2", "verdict": "equal"}])
    (table.run.path / "proof.json").write_text("cut")
    assert story.proof(table.run, beside) == found
    assert story.proof(table.run) is None, "of folders that are not shown nothing is told"
    began = tmp_path / "began" / "runs"
    began.mkdir(parents=True)
    shutil.move(tmp_path / "proven", began / "proven")
    table.run.write_settings({"run": {"folder": str(tmp_path / "began")}})
    assert story.proof(table.run, beside) is None, "wherever run.toml says that it began"
    (tmp_path / "proven").symlink_to(began / "proven")
    (tmp_path / "old" / "proof.json").unlink()
    (tmp_path / "old" / "proof.json").symlink_to(began / "proven" / "proof.json")
    assert story.proof(table.run, beside[:2]) is None
    (table.run.path / "proof.json").write_text(json.dumps({"code": "own", "results": None}))
    assert story.proof(table.run) == {"from": "run", "class": None, "code": "own", "results": []}
