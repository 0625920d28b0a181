"""A proof told: a table on the screen, ``proof.json`` and JUnit XML in the run's folder."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO
from xml.etree import ElementTree

import torch

from phalanx import __version__
from phalanx.events import plain
from phalanx.files import write_whole
from phalanx.proofs import record
from phalanx.prove.cases import Docket
from phalanx.prove.ladder import RUNGS
from phalanx.prove.results import DIFFERS, EQUAL, NOT_APPLICABLE, UNKNOWN, Proof, Result
from phalanx.redact import redact
from phalanx.task import Task

QUIET_SECONDS = 10.0
MARKS = {EQUAL: "=", DIFFERS: "!", NOT_APPLICABLE: "-", UNKNOWN: "?"}


class Table:
    """A row for each layout, as it is done."""

    def __init__(self, out: TextIO | None = None) -> None:
        self.out = out or sys.stdout
        self.began = self.told = time.monotonic()
        self.live = self.out.isatty()

    def start(self, docket: Docket) -> None:
        """What is proven, and how."""
        standards = [case.standard for case in docket.cases]
        for warning in docket.checked.warnings:
            self._write(f"warning  {warning}")
        if docket.notes:
            self._write(f" shrunk  {', '.join(docket.notes)}")
        for note in docket.hostility:
            self._write(f"hostile  {note}")
        if standards:
            sensitivity, bar = max(s.sensitivity for s in standards), max(s.bar for s in standards)
            self._write(f"    bar  {bar:.1e}: one rounding at the beginning becomes {sensitivity:.1e} on one device")
            buffers = max(s.buffer_bar for s in standards)
            if buffers > bar:
                grows = max(s.buffer_sensitivity for s in standards)
                self._write(f"    bar  {buffers:.1e} for buffers, such as running means: there it becomes {grows:.1e}")
        self._write(f"\n  {'layout':<58} {'verdict':<15} {'error':>8} {'seconds':>7}  worst tensor")

    def progress(self, text: str) -> None:
        """What is being done: on a terminal in a line that renews itself, elsewhere now and then."""
        now = time.monotonic()
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            print("\r" + f"... {text}"[:width].ljust(width), end="", file=self.out, flush=True)
        elif now - self.told > QUIET_SECONDS:
            self._write(f"    ... {text} ({now - self.began:.0f} s)")

    def row(self, result: Result) -> None:
        error = "" if result.reason else f"{result.error:.0e}"
        told = result.reason.partition("\n")[0].partition(". ")[0] or result.worst
        mark, seconds = MARKS[result.verdict], f"{result.seconds:.1f}"
        self._write(f"{mark} {result.layout:<58} {result.verdict:<15} {error:>8} {seconds:>7}  {told}")

    def end(self) -> None:
        self._write(f"\n{time.monotonic() - self.began:.0f} s")

    def _write(self, text: str) -> None:
        self.told = time.monotonic()
        clear = "\r" + " " * (shutil.get_terminal_size().columns - 1) + "\r" if self.live else ""
        print(clear + text, file=self.out, flush=True)


def as_json(proof: Proof, task: Task, settings: Mapping[str, Any]) -> dict[str, Any]:
    """All that a program may want to know of a proof."""
    facts = {
        **record(type(task), proof.files), "settings": dict(settings),
        "versions": {"phalanx": __version__, "torch": torch.__version__}, "time": time.time(), "rungs": RUNGS,
    }  # fmt: skip
    return plain(dataclasses.asdict(proof) | {"exit_code": proof.exit_code} | facts)


def write(proof: Proof, task: Task, settings: Mapping[str, Any], folder: Path) -> None:
    """Leave ``proof.json`` and ``junit.xml`` in a folder."""
    write_whole(folder / "proof.json", json.dumps(as_json(proof, task, settings), indent=1) + "\n")
    suite = ElementTree.Element(
        "testsuite", name=f"phalanx prove {proof.task}", tests=str(len(proof.results)),
        failures=str(sum(r.verdict == DIFFERS for r in proof.results)),
        errors=str(sum(r.verdict == UNKNOWN for r in proof.results)),
        skipped=str(sum(r.verdict == NOT_APPLICABLE for r in proof.results)),
        time=f"{sum(r.seconds for r in proof.results):.3f}",
    )  # fmt: skip
    for result in proof.results:
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"phalanx.prove.{proof.task}", name=result.layout, time=f"{result.seconds:.3f}"
        )
        if result.finding is not None:
            failure = ElementTree.SubElement(case, "failure", message=result.finding.cause)
            failure.text = str(result.finding)
        elif result.verdict == UNKNOWN:
            ElementTree.SubElement(case, "error", message=result.reason.partition("\n")[0]).text = result.reason
        elif result.verdict == NOT_APPLICABLE:
            ElementTree.SubElement(case, "skipped", message=result.reason)
    if not proof.results and not proof.holds:
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"phalanx.prove.{proof.task}", name="the task itself"
        )
        ElementTree.SubElement(case, "failure", message=proof.summary)
        suite.set("tests", "1")
        suite.set("failures", "1")
    write_whole(folder / "junit.xml", redact(ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)))
