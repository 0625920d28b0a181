"""What the ranks of a pool do for a proof: run a task under a layout, and be watched."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx import user_code
from phalanx.checkpoint.slot import Slot
from phalanx.errors import WrongUse
from phalanx.layout import Layout
from phalanx.parallel.communication.traffic import Traffic
from phalanx.parallel.randomness.answers import Answers
from phalanx.precision import DTYPES
from phalanx.prove.bugs.known import planted
from phalanx.prove.ladder import Difference, Standard
from phalanx.prove.layouts import as_proven
from phalanx.prove.ranks.pieces import times_here
from phalanx.prove.ranks.record import Record, Recorder
from phalanx.prove.ranks.resuming import Interruption, Resume, emptied
from phalanx.prove.ranks.witness import Testimony, Witness
from phalanx.prove.reference.activations import rounding
from phalanx.prove.reference.hostile import Hostile, cramped
from phalanx.prove.reference.steady import Steady
from phalanx.prove.reference.switched import method_of
from phalanx.task import Task
from phalanx.train.beforehand import join_beforehand
from phalanx.train.engine import Engine

Call = tuple[str, str, int]
"""A collective as a rank launched it: axis, kind, and elements."""


@dataclass
class Case:
    """A task as it is proven, and what its layouts are held against."""

    task: Task
    standard: Standard
    micro_batches: int
    """Of the reference."""
    at_once: bool = False
    """Whether its loss needs all samples of a step at the same time."""
    sites: list[Standard] = field(default_factory=list)
    """Where sites train by themselves, what each is held against; the first is the standard."""
    half: int = 0
    """The step before which a run is interrupted; 0: the trial's."""
    dtypes: str = field(init=False)

    def __post_init__(self) -> None:
        assert isinstance(self.task, Hostile)
        self.dtypes = DTYPES[self.task.precision].table()
        self.half = self.half or self.task.proof_trial.half

    def standard_of(self, engine: Engine) -> Standard:
        """What a rank is held against."""
        return self.sites[engine.mesh.index("dp")] if engine.sites is not None else self.standard

    def as_run(self, layout: Layout) -> Layout:
        """A layout with the micro-batches of the proof."""
        return as_proven(layout, self.task.global_batch, self.at_once)


TIMEOUT = timedelta(seconds=15)
"""How long a rank waits for another before it says so."""
CASES: list[Case] = []
"""Those of this proof; ranks are told them when they begin."""
MEMORY: list[list[int]] = []
"""On a rank: by rank, memory for copies of its state, which the others can see."""


def begin(cases: list[Case], *memory: int) -> None:
    """What a rank does first."""
    CASES[:] = cases
    MEMORY[:] = [list(memory[n : n + 2]) for n in range(0, len(memory), 2)]


class Stopped(Exception):
    """A rank could not go on; carries what it had done."""

    def __init__(
        self, reason: str, trace: str, step: int, calls: list[Call], seen: list[Difference], rung: str = "running"
    ) -> None:
        super().__init__(reason, trace, step, calls, seen, rung)
        self.reason, self.trace, self.step, self.calls, self.seen = reason, trace, step, calls, seen
        self.rung = rung


def attest(case: int, layout: Layout, bug: str | None, resume: Resume | None = None) -> Testimony:
    """A rank's testimony of one run, interrupted half way if there is where to ``resume`` from."""
    told: Testimony = _run(
        case, layout, bug, lambda engine: Witness(engine, CASES[case].standard_of(engine), CASES[case].dtypes), resume
    )
    told.imported = sorted({str(file) for file in user_code.modules().values()})
    return told


def record(case: int, layout: Layout, bug: str | None, step: int) -> Record:
    """A rank's record of one step."""
    return _run(case, layout, bug, lambda engine: Recorder(engine, step))


def _steady(engine: Engine, standard: Standard) -> None:
    """Have casts and choices answered as in the reference."""
    randomness = engine.spread.randomness
    if isinstance(randomness.answers, Answers):
        steady = Steady(
            randomness, standard.decisions, lambda step: len(standard.steps[step].ids), partial(times_here, engine),
            wide=engine.dtypes.compute == torch.float64,
        )  # fmt: skip
        randomness.answers.before = steady.answers | randomness.answers.before
        randomness.asked |= bool(standard.decisions.made or standard.decisions.lifted)


def _run(
    case: int, layout: Layout, bug: str | None, watch: Callable[[Engine], Any], resume: Resume | None = None
) -> Any:
    """Train to the trial's end under the eyes of what ``watch`` makes, and return what it says."""
    run = TrialRun(CASES[case], layout, resume)
    try:
        with cramped(), planted(bug):
            return run.watched(watch)
    except WrongUse as refusal:
        if run.step > 0:  # what cannot work does not work from the beginning
            raise run.stopped(f"refused in step {run.step}: {refusal}", []) from None
        raise
    except Exception as error:
        seen = run.watching.told.differences if isinstance(run.watching, Witness) else []
        raise run.stopped(f"{type(error).__name__}: {error}", seen) from None


class TrialRun:
    """One rank's run of a case under a layout, as far as it has come."""

    def __init__(self, case: Case, layout: Layout, resume: Resume | None) -> None:
        assert isinstance(case.task, Hostile)
        self.case, self.task, self.layout, self.resume = case, case.task, layout, resume
        self.calls: list[Call] = []
        self.traffic = Traffic()
        self.traffic.watchers.append(self.launched)
        self.watching: Any = None
        self.step, self.rung, self.resumed = -1, "running", False
        self.whole: set[str] = set()
        """Containers that ranks of ``tp`` are known to compute alike."""

    def launched(self, axis: str, kind: str, tensor: Tensor) -> None:
        """Note a collective."""
        self.calls.append((axis, kind, tensor.numel()))

    def stopped(self, reason: str, seen: list[Difference]) -> Stopped:
        return Stopped(reason, traceback.format_exc(), self.step, self.calls, seen, self.rung)

    def watched(self, watch: Callable[[Engine], Any]) -> Any:
        """Train to the end; with ``resume``, interrupted half way."""
        with ExitStack() as after_half, ExitStack() as until_half:
            engine = until_half.enter_context(self._engine())
            self.watching = watch(engine)
            if self.resume is not None:
                slots = _slots(engine.environment.world)
                interruption = Interruption(self.resume, self.watching, self.case.half, slots)
                until_half.callback(interruption.close)
                self._until_half(engine, interruption)
                if self.resume.thorough:
                    until_half.close()
                    engine = after_half.enter_context(self._engine())
                interruption.go_on(emptied(engine))
                self.rung, self.resumed = "running", True
            for _ in self._steps(engine):
                pass
            return self.watching.finish()

    def _until_half(self, engine: Engine, interruption: Interruption) -> None:
        for _ in self._steps(engine):
            self.rung = "resume"
            if interruption.after_step():
                break
            self.rung = "running"

    def _steps(self, engine: Engine) -> Iterator[int]:
        for batch in engine.batches():
            self.step = batch.step
            engine.auto_comm.follow(method_of(batch.step))
            self.watching.before(batch)
            if self.resumed and self.watching.astray:
                break
            metrics = engine.step(batch)
            self._check_containers(engine)
            self.watching.after(batch, metrics)
            yield batch.step

    def _check_containers(self, engine: Engine) -> None:
        """One device rounds as the layout is planned: refuse a container of which ranks found out that it does not fit.

        What such a one sends is sent as it is.
        """
        found = [one for one in engine.spread.plan.containers.values() if one.gathered and one.name not in self.whole]
        if found and "activations" in rounding(self.layout):
            raise WrongUse(
                f"{found[0].gathered}, which shows only on ranks, so that one device does not round as "
                f"{rounding(self.layout)} does. Prove it without activations"
            )

    def _engine(self) -> Engine:
        engine = Engine(self.task, self.layout, device="cpu", timeout=TIMEOUT, traffic=self.traffic)
        self.whole = {one.name for one in engine.spread.plan.containers.values() if one.gathered}
        engine.spread.probe.compares = False  # the proof itself will tell, and where
        if self.layout.tp == 1:
            engine.spread.probe.untried.clear()
        self.task.proof_trial.moment = engine.spread.moment
        standard = self.case.standard_of(engine)
        _steady(engine, standard)
        standard.decisions.resting = True
        join_beforehand(engine)  # once more, in the arithmetic of the proof
        standard.decisions.resting = False
        return engine


def _slots(world: int) -> list[list[Slot]]:
    return [[Slot(memory) for memory in memories] for memories in MEMORY[:world]]
