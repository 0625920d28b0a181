"""A proof on disk and on the screen."""

from __future__ import annotations

import io
import json
from pathlib import Path
from xml.etree import ElementTree

from phalanx.prove.explanation.finding import Finding
from phalanx.prove.proof import prove
from phalanx.prove.report import Table, write
from phalanx.prove.results import Proof, Result
from tests.prove.tasks import Normed, Plain

FINDING = Finding("gradients", "0.weight", 0, float("inf"), [0, 1], ["dp"], "ratio", 2.0, "twice what it should be.")
PROOF = Proof(
    False, "does not hold", task="Plain",
    results=[Result("dp=2", "differs", finding=FINDING), Result("tp=2", "not applicable", "nothing to cut")],
)  # fmt: skip


def test_files_are_read_by_programs(tmp_path: Path) -> None:
    write(PROOF, Plain(), {"width": 8}, tmp_path)
    told = json.loads((tmp_path / "proof.json").read_text())
    assert told["results"][0]["finding"]["factor"] == 2.0
    assert told["results"][0]["finding"]["error"] == "inf"
    assert told["code"]
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("2", "1", "1")
    failure = suite.find("testcase/failure")
    assert failure is not None
    assert failure.get("message") == "twice what it should be."


def test_buffers_have_a_bar_of_their_own() -> None:
    out = io.StringIO()
    proof = prove(Normed(), ["dp=2"], on_start=Table(out).start)
    assert proof.buffer_bar > proof.bar
    assert f"    bar  {proof.bar:.1e}: one rounding" in out.getvalue()
    assert f"    bar  {proof.buffer_bar:.1e} for buffers" in out.getvalue()
    assert all(result.error <= proof.buffer_bar for result in proof.results)


def test_a_row_a_layout() -> None:
    out = io.StringIO()
    table = Table(out)
    for result in PROOF.results:
        table.row(result)
    assert out.getvalue().splitlines()[0].startswith("! dp=2 ")
    assert "nothing to cut" in out.getvalue()
