"""Proving: every layout run on real ranks and held against one device; what differs is made small and explained."""

from __future__ import annotations

import copy
import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from phalanx import user_code
from phalanx.errors import CannotHere, WrongUse, closest
from phalanx.launch import blame, forkserver
from phalanx.launch.forkserver import ForkServer
from phalanx.layout import CHOICES, DEGREES, Layout
from phalanx.parallel.weights.blueprint import Blueprint
from phalanx.prove.bugs import known
from phalanx.prove.cases import Docket, applicable
from phalanx.prove.explanation.explain import Inquiry, explain_evaluation, explain_interruption, explain_resume
from phalanx.prove.explanation.finding import Finding
from phalanx.prove.explanation.stopped import explain_stop
from phalanx.prove.ladder import NARROW_MARGIN, RESUMING, first
from phalanx.prove.layouts import covering, every
from phalanx.prove.ranks import trial
from phalanx.prove.ranks.outcome import Outcome, ProofRanks
from phalanx.prove.ranks.record import Whole
from phalanx.prove.reference.failing import Unprovable
from phalanx.task import Precision, Task
from phalanx.traces import folded
from phalanx.train.check.beside import Checked, checked
from phalanx.verdict import Verdict

NARROW: tuple[Precision, ...] = ("bf16", "fp16", "fp32")
EQUAL, DIFFERS, NOT_APPLICABLE = "equal", "differs", "not applicable"


@dataclass
class Result:
    """What became of one layout."""

    layout: str
    verdict: str
    reason: str = ""
    """Why it is not applicable."""
    worst: str = ""
    """The tensor that is furthest off."""
    error: float = 0.0
    seconds: float = 0.0
    finding: Finding | None = None


@dataclass
class Proof(Verdict):
    """A verdict with the result of every layout."""

    task: str = ""
    steps: int = 0
    sensitivity: float = 0.0
    """What one rounding at the beginning becomes on one device."""
    bar: float = 0.0
    """What follows from it: a difference above this is a finding."""
    buffer_bar: float = 0.0
    """The same for buffers."""
    shrunk: list[str] = field(default_factory=list)
    inject: str | None = None
    dtype: str | None = None
    """The precision that was proven beside float64."""
    results: list[Result] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    """The user's files that were imported, here or on a rank, with hashes: what it is a proof of."""
    unchecked: str = ""
    """Why the task was not checked on one device first, if it was not."""


OPTIONS = ("zero", "exact", *CHOICES)
OnResult = Callable[[Result], None]


MOST_STEPS = 10_000


def prove(
    task: Task,
    layouts: Sequence[Layout | str] | Layout | str = "all",
    *,
    ranks: int = 4,
    steps: int = 3,
    dtype: Precision | None = None,
    inject: str | None = None,
    check: bool = True,
    on_start: Callable[[Docket], None] | None = None,
    on_result: OnResult | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Proof:
    """Whether a task trains under each layout as it does on one device, and if not, where and why.

    ``check``: what is certainly wrong with the task on one device is refused first.
    """
    if not isinstance(task, Task):
        raise WrongUse(f"{task!r} is no task. Give an instance of a phalanx.Task, e.g. MyTask().")
    task.check()
    if steps < 1:
        raise WrongUse(f"--steps {steps} proves nothing. Give 1 or more; from 3 on an epoch's end is among them.")
    if steps > MOST_STEPS:
        raise WrongUse(f"--steps {steps} are more than a proof holds in memory. Give at most {MOST_STEPS:,}.")
    if ranks < 1:
        raise WrongUse(f"--ranks {ranks} is not a number of ranks. Give 1 or more.")
    if dtype is not None and dtype not in NARROW:
        raise WrongUse(f"--dtype {dtype} is not one that can be proven; {closest(dtype, NARROW)}")
    if inject is not None:
        known.find(inject)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks compute, and OpenMP's threads would not survive a fork
    server = forkserver.kept() or ForkServer(_without_copying(task))
    try:
        prover = _Prover(task, steps, dtype, inject, server, on_start, on_result)
        prover.docket.tell = on_progress or prover.docket.tell
        if inject is None:  # else it is the bug that counts
            prover.docket.checked = checked(copy.copy(task)).or_refuse() if check else Checked(left_out="--unchecked")
        return prover.prove(layouts, ranks)
    finally:
        if server is not forkserver.kept():
            server.close()
        torch.set_num_threads(threads)
        trial.CASES.clear()


def _without_copying(task: Task) -> dict[str, Any]:
    """What of a task need not be sent to ranks that were forked with it, and perhaps cannot be."""
    plain = (bool, int, float, str, type(None))
    parts = {f"its {name}": value for name, value in vars(task).items() if not isinstance(value, plain)}
    return {"the task": task, **parts}


class _Prover:
    def __init__(
        self,
        task: Task,
        steps: int,
        dtype: Precision | None,
        inject: str | None,
        server: ForkServer,
        on_start: Callable[[Docket], None] | None,
        on_result: OnResult | None,
    ) -> None:
        self.task, self.dtype, self.inject, self.server = task, dtype, inject, server
        self.on_start, self.on_result = on_start, on_result
        self.home = user_code.home(type(task))
        self.files = user_code.snapshot(self.home)  # now, for what is edited while a proof runs is not what it proves
        self.imported: set[str] = set()
        self.docket = Docket(task, steps, 1)
        try:
            self.model = Blueprint(task.model, task.seed).model
            self.anatomy = task.anatomy(self.model)
        except (WrongUse, CannotHere):
            raise
        except Exception as error:
            told = f"{type(task).__name__} fails on one device: {blame.reason(error)}"
            raise WrongUse(f"{told}\n{folded(error)}\nMend that first.") from error
        self.results: list[Result] = []
        self.works: set[Layout] = set()
        """Of all layouts, those that nothing speaks against before they run."""

    def prove(self, layouts: Sequence[Layout | str] | Layout | str, ranks: int) -> Proof:
        chosen = self._chosen(layouts, ranks)
        self.docket.ranks = max(layout.world for layout in chosen)
        reasons = {layout: applicable(self.task, layout, self.model, self.anatomy) for layout in chosen}
        try:
            numbers = {layout: self.docket.number(layout) for layout in chosen if reasons[layout] is None}
        except Unprovable as why:
            return self._proof(Verdict(False, why.summary, why.evidence, next=why.next, code=why.code))
        if self.on_start is not None:
            self.on_start(self.docket)
        if self.dtype is not None:
            for number in set(numbers.values()):
                self.docket.narrow(number, self.dtype)
        trial.CASES[:] = self.docket.cases
        with ProofRanks(self.server, self.docket.ranks if numbers else 0, self.inject) as self.ranks:
            for layout in chosen:
                self._timed(layout, numbers.get(layout), reasons[layout])
            if layouts == "all":
                self._cover_the_rest()
        return self._proof(self._verdict())

    def _timed(self, layout: Layout, number: int | None, reason: str | None) -> Result:
        started = time.perf_counter()
        self.docket.tell(str(layout))
        refused = Result(str(layout), NOT_APPLICABLE, reason or "")
        result = refused if number is None else self._layout(layout, number)
        result.seconds = time.perf_counter() - started
        self.results.append(result)
        if self.on_result is not None:
            self.on_result(result)
        return result

    def _cover_the_rest(self) -> None:
        """Some are refused only when they run: what they were to cover is covered by others, as far as can be."""
        refused = {Layout.parse(r.layout) for r in self.results if r.verdict == NOT_APPLICABLE}
        done = {Layout.parse(r.layout) for r in self.results} - refused
        while refused & self.works:
            self.works -= refused
            more = covering(sorted(self.works, key=str), sorted(done, key=str))
            refused = set()
            for layout in more:
                if (number := self.docket.known(layout)) is not None:
                    kind = self._timed(layout, number, None).verdict
                    (refused if kind == NOT_APPLICABLE else done).add(layout)
                else:
                    self.works.discard(layout)

    def _chosen(self, layouts: Sequence[Layout | str] | Layout | str, ranks: int) -> list[Layout]:
        if layouts == "all":
            return self._all(ranks)
        given = [layouts] if isinstance(layouts, (str, Layout)) else layouts
        found = list(dict.fromkeys(Layout.parse(item) if isinstance(item, str) else item for item in given))
        if not found:
            raise WrongUse("there is no layout to prove. Name some, e.g. --layouts dp=2 --layouts fsdp=4, or all.")
        return found

    def _all(self, ranks: int) -> list[Layout]:
        """Enough of those that can work, and one of each kind that cannot."""
        found = list(every(ranks, experts=bool(self.anatomy.experts), blocks=bool(self.anatomy.blocks)))
        reasons = {layout: applicable(self.task, layout, self.model, self.anatomy) for layout in found}
        works = [layout for layout in found if reasons[layout] is None]
        self.works = set(works)
        refused = {_without_numbers(reason): layout for layout, reason in reasons.items() if reason is not None}
        return [*covering(works), *refused.values()]

    def _layout(self, layout: Layout, number: int) -> Result:
        run = self.docket.cases[number].as_run(layout)
        found = self.ranks.attest(number, run, keep=True)
        self.imported.update(file for told in found.told for file in told.imported)
        if found.refusal is not None:
            return Result(str(layout), NOT_APPLICABLE, found.refusal)
        result = Result(str(layout), DIFFERS if found.fails else EQUAL)
        result.error, result.worst = max((t.worst for t in found.told), default=(0.0, ""))
        if self.dtype is not None and not found.fails:
            number = self.docket.narrow(number, self.dtype)
            found = self.ranks.attest(number, run, keep=True)
            result.verdict = DIFFERS if found.fails else EQUAL
        if found.fails:
            result.finding = self._told(layout, number, found)
            result.error, result.worst = result.finding.error, f"{result.finding.rung}: {result.finding.name}"
        return result

    def _told(self, layout: Layout, number: int, found: Outcome) -> Finding:
        """A finding, explained if that can be done: what was found is not lost over it."""
        try:
            return self._explained(layout, number, found)
        except Exception:
            lead = first(found.differences)[0]
            told = f"it could not be explained further: {traceback.format_exc(limit=-2)}"
            return Finding(lead.rung, lead.name, lead.step, lead.error, [lead.rank], [], "unexplained", cause=told)

    def _explained(self, layout: Layout, number: int, found: Outcome) -> Finding:
        case = self.docket.cases[number]
        if found.unfinished:
            run = case.as_run(layout)
            finding = explain_stop(run, found.unfinished, found.stopped, found.seen_before_stopping)
        else:
            layout, found = self._minimal(layout, number, found)
            interrupted = self._explained_resume(layout, number, found)
            if interrupted is not None:
                return interrupted
            if case.standard.limits is not None:
                return self._explained_narrow(layout, number, found)
            if first(found.differences)[0].rung == "evaluation":
                return explain_evaluation(case.task, found.differences, self._axes(layout, number), str(layout))
            step = first(found.differences)[0].step
            records = self.ranks.record(number, layout, step)
            whole = Whole.of(case.task, case.micro_batches, step)
            axes = self._axes(layout, number)
            finding = Inquiry(case.task, layout, case.standard, found.differences, records, whole, axes).finding()
        finding.next = finding.next or "Mend it, then prove this layout again."
        return finding

    def _explained_resume(self, layout: Layout, number: int, found: Outcome) -> Finding | None:
        """A finding, if it is that the run was interrupted which made the difference."""
        rung = first(found.differences)
        lead, half = rung[0], self.docket.half
        finding = None
        if lead.rung in RESUMING and lead.step == half - 1:
            axes, saver = self._axes(layout, number), self.ranks.saved_by(number)
            finding = explain_resume(found.differences, axes, str(layout), half, saver)
        elif lead.step >= half and not self.ranks.attest(number, layout, interrupted=False).fails:
            names = [name for name in dict.fromkeys(d.name for d in rung) if name != lead.name]
            finding = explain_interruption(lead, names, self._axes(layout, number), str(layout), half)
        if finding is not None:
            finding.next = "Mend it, then prove this layout again."
        return finding

    def _explained_narrow(self, layout: Layout, number: int, found: Outcome) -> Finding:
        """What float64 does not show can only lie in what is done to dtypes."""
        rung = first(found.differences)
        lead, names = rung[0], list(dict.fromkeys(d.name for d in rung))
        limit = self.docket.cases[number].standard.limit(lead.step, lead.rung)
        return Finding(
            lead.rung, lead.name, lead.step, lead.error, sorted({d.rank for d in rung}), self._axes(layout, number),
            "precision", affected=names[1:], minimal=str(layout), next="Mend it, then prove this layout again.",
            cause=f"in float64 this layout trains like one device, and in {self.dtype} it does not: one device itself "
            f"is off by {limit / NARROW_MARGIN:.1e} at most there. {lead.found} Look at what is cast and where: the "
            "dtype in which messages travel and sums are kept, the loss scale, what is kept narrow between steps.",
        )  # fmt: skip

    def _minimal(self, layout: Layout, number: int, found: Outcome) -> tuple[Layout, Outcome]:
        """The smallest layout that still fails, as it is run."""
        tried = set()
        while True:
            for smaller in _smaller(layout):
                run = self.docket.cases[number].as_run(smaller)
                if run in tried or not self._comparable(run, number):
                    continue
                tried.add(run)
                again = self.ranks.attest(number, run)
                if not again.unfinished and again.differences and _like(again, found):
                    layout, found = smaller, again
                    break
            else:
                return self.docket.cases[number].as_run(layout), found

    def _comparable(self, layout: Layout, number: int) -> bool:
        """Whether a case's reference has the micro-batches that a layout has, where that matters."""
        case = self.docket.cases[number]
        return case.micro_batches == 1 or layout.micro_batches(case.task.global_batch) == case.micro_batches

    def _axes(self, layout: Layout, number: int) -> list[str]:
        """What a minimal layout cannot do without."""
        axes = [axis for axis in DEGREES if getattr(layout, axis) > 1]
        if layout.ep > 1 and layout.fsdp * layout.cp == layout.ep:
            axes = [axis for axis in axes if axis not in ("fsdp", "cp")]  # which only hold the experts' ranks
        plain = Layout()
        axes += [f"{name}={getattr(layout, name)}" for name in OPTIONS if getattr(layout, name) != getattr(plain, name)]
        whole = replace(layout, micro_batch=None)
        if self._comparable(whole, number) and self.docket.cases[number].micro_batches == 1:
            again = self.ranks.attest(number, whole)
            if not again.fails:
                axes.append("micro-batches")
        return axes

    def _verdict(self) -> Verdict:
        by = {kind: [r for r in self.results if r.verdict == kind] for kind in (EQUAL, DIFFERS, NOT_APPLICABLE)}
        name = type(self.task).__name__
        if by[DIFFERS]:
            summary = f"{name} does not train like one device under {len(by[DIFFERS])} of {len(self.results)} layouts"
            first_finding = by[DIFFERS][0].finding
            assert first_finding is not None
            return Verdict(False, summary, [f"{r.layout}\n{r.finding}" for r in by[DIFFERS]], first_finding.next)
        if not by[EQUAL]:
            return Verdict(
                False, f"nothing was proven: none of {len(self.results)} layouts is applicable to {name}",
                [f"{r.layout}: {r.reason}" for r in by[NOT_APPLICABLE]],
                "Choose layouts that the model and the batch allow.", code=2,
            )  # fmt: skip
        rest = f"; {len(by[NOT_APPLICABLE])} not applicable" if by[NOT_APPLICABLE] else ""
        layouts = "1 layout" if len(by[EQUAL]) == 1 else f"{len(by[EQUAL])} layouts"
        return Verdict(True, f"{name} trains like one device under {layouts}{rest}")

    def _proof(self, verdict: Verdict) -> Proof:
        standards = [case.standard for case in self.docket.cases]
        return Proof(
            **vars(verdict), task=type(self.task).__name__, steps=self.docket.steps, shrunk=self.docket.notes,
            inject=self.inject, dtype=self.dtype, sensitivity=max((s.sensitivity for s in standards), default=0.0),
            bar=max((s.bar for s in standards), default=0.0),
            buffer_bar=max((s.buffer_bar for s in standards), default=0.0), results=self.results,
            files=user_code.snapshot(self.home, self.imported) | self.files,
            unchecked=self.docket.checked.left_out,
        )  # fmt: skip


def _without_numbers(reason: str) -> str:
    return re.sub(r"\d+", "", reason.partition(". ")[0])


def _smaller(layout: Layout) -> Iterator[Layout]:
    """Layouts with one part less than this."""
    for axis in ("ep", "tp", "cp", "pp", "fsdp", "dp"):
        if getattr(layout, axis) > 1:
            without = _with(layout, axis, 1)
            yield without if not (without.fsdp * without.cp) % without.ep else replace(without, ep=1)
    for axis in ("ep", "tp", "cp", "pp", "fsdp", "dp"):
        if getattr(layout, axis) > 2:
            yield _with(layout, axis, 2)
    for option in OPTIONS:
        if getattr(layout, option) != getattr(Layout(), option):
            yield _with(layout, option, getattr(Layout(), option))


def _like(one: Outcome, other: Outcome) -> bool:
    """Whether two runs fail at the same rung: otherwise it may be for another reason."""
    return first(one.differences)[0].rung == first(other.differences)[0].rung


def _with(layout: Layout, name: str, value: Any) -> Layout:
    return replace(layout, **{name: value})
