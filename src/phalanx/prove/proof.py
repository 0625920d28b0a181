"""Proving: every layout run on real ranks and held against one device; what differs is made small and explained."""

from __future__ import annotations

import copy
import re
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx import user_code
from phalanx.errors import CannotHere, WrongUse, closest
from phalanx.launch import blame, forkserver
from phalanx.launch.forkserver import ForkServer, without_copying
from phalanx.layout import Layout
from phalanx.parallel.weights.blueprint import Blueprint
from phalanx.parameters import building
from phalanx.prove.bugs import known
from phalanx.prove.cases import Docket, applicable
from phalanx.prove.findings import Findings
from phalanx.prove.layouts import covering, each_choice, every
from phalanx.prove.own_faults import in_words, is_own
from phalanx.prove.ranks import trial
from phalanx.prove.ranks.outcome import ProofRanks
from phalanx.prove.reference.activations import rounding
from phalanx.prove.reference.failing import Unprovable
from phalanx.prove.results import DIFFERS, EQUAL, NOT_APPLICABLE, UNKNOWN, Proof, Result, concluded
from phalanx.task import Precision, Task
from phalanx.traces import folded
from phalanx.train.check.beside import Checked, checked
from phalanx.verdict import Verdict

NARROW: tuple[Precision, ...] = ("bf16", "fp16", "fp8", "fp8_rowwise", "fp32")
LOCAL_STEPS = 4
"""Where sites train by themselves there are at least so many: they agree, and are interrupted there."""
MOST_STEPS = 10_000
OnResult = Callable[[Result], None]


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
    _check(task, ranks, steps, dtype)
    if inject is not None:
        known.find(inject)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks compute, and OpenMP's threads would not survive a fork
    server = forkserver.kept() or ForkServer(without_copying(task))
    try:
        prover = _Prover(task, steps, dtype, inject, server, on_start, on_result)
        prover.docket.tell = on_progress or prover.docket.tell
        if inject is None:  # else it is the bug that counts
            prover.docket.checked = checked(copy.copy(task)).or_refuse() if check else Checked(left_out="--unchecked")
        return prover.prove(layouts, ranks)
    except (WrongUse, CannotHere):
        raise
    except Exception as error:
        trace = traceback.format_exc()
        if is_own(trace):
            raise CannotHere(in_words("the proof", trace)) from error
        raise
    finally:
        if server is not forkserver.kept():
            server.close()
        torch.set_num_threads(threads)
        trial.CASES.clear()


def _check(task: Any, ranks: int, steps: int, dtype: Precision | None) -> None:
    """Refuse what cannot be proven."""
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
            self.model = Blueprint(building(task), task.seed).model
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
        if any(layout.local for layout in chosen):
            self.docket.steps = max(self.docket.steps, LOCAL_STEPS)
        reasons = {layout: self._why_not(layout) for layout in chosen}
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
        return self._proof(concluded(type(self.task).__name__, self.results))

    def _why_not(self, layout: Layout) -> str | None:
        """Why a layout cannot be proven, or None."""
        if layout.local and layout.activations != "exact":
            return f"comm={layout.comm} and activations={layout.activations} are proven one at a time. Leave one out"
        if self.dtype is not None and rounding(layout):
            return (
                f"{rounding(layout)} is proven in float64 alone: in {self.dtype} a last bit decides about codes. Leave "
                "--dtype out"
            )
        if "activations" in rounding(layout) and layout.cp & (layout.cp - 1):
            return (
                f"gradients travel divided by cp={layout.cp}, which is no power of two, so that one device does not "
                f"round them as {rounding(layout)} does. Prove it with cp=2"
            )
        return applicable(self.task, layout, self.model, self.anatomy)

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
        named = [Layout.parse(item) if isinstance(item, str) else item for item in given]
        found = list(dict.fromkeys(layout for each in named for layout in each_choice(each)))
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
        if found.own_fault is not None:
            return Result(str(layout), UNKNOWN, in_words("a rank", found.own_fault.trace))
        result = Result(str(layout), DIFFERS if found.fails else EQUAL)
        result.error, result.worst = max((t.worst for t in found.told), default=(0.0, ""))
        if self.dtype is not None and not found.fails:
            number = self.docket.narrow(number, self.dtype)
            found = self.ranks.attest(number, run, keep=True)
            if found.refusal is not None:  # what float64 can, a narrow dtype need not
                return Result(str(layout), NOT_APPLICABLE, found.refusal)
            result.verdict = DIFFERS if found.fails else EQUAL
        if found.fails:
            result.finding = Findings(self.docket, self.ranks, self.dtype).of(layout, number, found)
            result.error, result.worst = result.finding.error, f"{result.finding.rung}: {result.finding.name}"
        return result

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
