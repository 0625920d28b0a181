"""What a user asked to have proven, from the command line's words to a verdict."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from phalanx import streams
from phalanx.cluster import Cluster
from phalanx.errors import WrongUse
from phalanx.layout import Layout
from phalanx.prove.bugs.known import BUGS, find
from phalanx.prove.bugs.planting import Bug
from phalanx.prove.proof import prove
from phalanx.prove.report import Table, as_json, write
from phalanx.references import find_task
from phalanx.run import Run, short_name
from phalanx.settings import make_task, parse_assignments, plain_settings
from phalanx.task import Task

RANKS = 4


@dataclass
class ProofJob:
    """A task, layouts, and how to prove them."""

    reference: str
    task: Task
    layouts: list[Layout] | str
    ranks: int
    steps: int
    dtype: Any = None
    bug: Bug | None = None
    notes: list[str] = field(default_factory=list)
    unchecked: bool = False

    @classmethod
    def resolve(
        cls,
        *,
        task: str | None,
        layouts: Sequence[str],
        assignments: Sequence[str],
        ranks: int | None,
        steps: int,
        dtype: str | None,
        inject: str | None,
        unchecked: bool = False,
    ) -> ProofJob:
        torch.set_num_threads(1)  # a task file may compute while it is imported, and no thread may survive into a fork
        bug = None if inject is None else find(inject)
        reference = task or (bug.task if bug else None)
        if reference is None:
            raise WrongUse("there is no task to prove. Name one: phalanx prove gpt, or phalanx prove file.py")
        kind = find_task(reference)
        values: dict[str, Any] = parse_assignments(assignments)
        notes = [] if bug is None else _set_for(bug, {f.name for f in fields(kind)}, values)
        if bug is not None and bug.dtype is not None and dtype is None:
            dtype = bug.dtype
            notes.append(f"--dtype {dtype} was set, without which {inject} does not show")
        chosen = _chosen(layouts, bug, ranks)
        ranks = RANKS if ranks is None else ranks
        worlds = [layout.world for layout in chosen if isinstance(layout, Layout)]
        Cluster("cpu", max(worlds, default=ranks)).check_room()
        return cls(reference, make_task(kind, values), chosen, ranks, steps, dtype, bug, notes, unchecked)

    def run(self, path: Path | None, as_text: bool) -> int:
        """Prove, tell, and leave it in a run's folder; returns the exit code."""
        run = Run.folder(path, f"prove-{short_name(self.reference)}")
        try:
            return self._run(run, as_text)
        finally:
            if not any(run.path.iterdir()):
                run.path.rmdir()  # nothing came of it, and its name should be free for the next try

    def _run(self, run: Run, as_text: bool) -> int:
        table = Table()
        if as_text:
            for note in [*self.notes, *([f"planted: {self.bug.name}: {self.bug.words}"] if self.bug else [])]:
                print(f"   note  {note}")
        proof = prove(
            self.task, self.layouts, ranks=self.ranks, steps=self.steps, dtype=self.dtype,
            inject=self.bug.name if self.bug else None, check=not self.unchecked,
            on_start=table.start if as_text else None, on_result=table.row if as_text else None,
            on_progress=table.progress if as_text else None,
        )  # fmt: skip
        settings = plain_settings(self.task)
        write(proof, self.task, settings, run.path)
        if not as_text:
            print(json.dumps(as_json(proof, self.task, settings)), file=streams.stdout(), flush=True)
            return proof.exit_code
        table.end()
        print(proof, file=sys.stdout if proof.holds else sys.stderr, flush=True)
        if self.bug is not None and proof.holds:
            print(
                f"{self.bug.name} was planted and does not show here. Try: phalanx prove --inject {self.bug.name}",
                file=sys.stderr,
            )
        print(f"proof: {run.path / 'proof.json'}", flush=True)
        return proof.exit_code


def _set_for(bug: Bug, known: set[str], values: dict[str, Any]) -> list[str]:
    """Give a task's fields the values without which a bug cannot happen; returns what to say of it."""
    notes = []
    for name, value in bug.settings.items():
        if name in known and name not in values:
            values[name] = str(value)
            notes.append(f"{name}={value} was set, without which {bug.name} cannot happen")
    return notes


def _chosen(layouts: Sequence[str], bug: Bug | None, ranks: int | None) -> list[Layout] | str:
    """The layouts that were named, the one that shows a bug, or all."""
    words = [word for given in layouts for word in given.replace(";", " ").split()]
    if not words and bug is not None:
        words = [bug.layout]
    if not words or words == ["all"]:
        return "all"
    chosen = [Layout.parse(word) for word in words]
    wrong = [layout for layout in chosen if layout.world != ranks]
    if wrong and ranks is not None:
        raise WrongUse(
            f"--ranks {ranks} and the layout {wrong[0]}, which has {wrong[0].world}, do not go together. Leave "
            "--ranks out: every layout says how many it needs."
        )
    return chosen


def listed() -> str:
    """Every bug that can be planted, a line each."""
    width = max(map(len, BUGS))
    return "\n".join(f"{name:<{width}}  {bug.layout:<14} {bug.words}" for name, bug in BUGS.items())
