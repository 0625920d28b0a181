"""What the ranks of a pool do for a proof: run a task under a layout, and be watched."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from phalanx import user_code
from phalanx.checkpoint.slot import Slot
from phalanx.errors import WrongUse
from phalanx.layout import Layout
from phalanx.parallel.communication.traffic import Traffic
from phalanx.parallel.randomness.answers import Answers
from phalanx.precision import DTYPES
from phalanx.prove.bugs.known import planted
from phalanx.prove.ladder import Difference, Standard
from phalanx.prove.layouts import One, as_proven
from phalanx.prove.ranks.pieces import times_here
from phalanx.prove.ranks.record import Record, Recorder
from phalanx.prove.ranks.resuming import Interruption, Resume, emptied
from phalanx.prove.ranks.witness import Testimony, Witness
from phalanx.prove.reference.hostile import Hostile, cramped
from phalanx.prove.reference.steady import Steady, homes
from phalanx.task import Task
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
    one: One = "never"
    """Where its layouts have one micro-batch alone."""
    dtypes: str = field(init=False)

    def __post_init__(self) -> None:
        self.dtypes = DTYPES[self.task.precision].table()

    def as_run(self, layout: Layout) -> Layout:
        """A layout with the micro-batches of the proof."""
        return as_proven(layout, self.task.global_batch, self.one)


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
        case, layout, bug, lambda engine: Witness(engine, CASES[case].standard, CASES[case].dtypes), resume
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
            randomness, standard.decisions, homes(engine.task, engine.spread.model),
            lambda step: len(standard.steps[step].ids), partial(times_here, engine),
            wide=engine.dtypes.compute == torch.float64,
        )  # fmt: skip
        randomness.answers.before = steady.answers | randomness.answers.before
        randomness.asked |= bool(standard.decisions.made or standard.decisions.lifted)


def _run(
    case: int, layout: Layout, bug: str | None, watch: Callable[[Engine], Any], resume: Resume | None = None
) -> Any:
    """Train to the trial's end under the eyes of what ``watch`` makes, and return what it says."""
    task, standard = CASES[case].task, CASES[case].standard
    assert isinstance(task, Hostile)
    calls: list[Call] = []
    step, rung, watching = -1, "running", None
    traffic = Traffic()
    traffic.watchers.append(lambda axis, kind, tensor: calls.append((axis, kind, tensor.numel())))
    try:
        with ExitStack() as stack:
            stack.enter_context(cramped())
            stack.enter_context(planted(bug))
            until_half = stack.enter_context(ExitStack())
            engine = until_half.enter_context(_engine(task, layout, standard, traffic))
            watching = watch(engine)
            interruption = None
            if resume is not None:
                interruption = Interruption(resume, watching, task.proof_trial.half, _slots(engine.environment.world))
                until_half.callback(interruption.close)
            for batch in engine.batches():
                step = batch.step
                watching.before(batch)
                watching.after(batch, engine.step(batch))
                if interruption is not None:
                    rung = "resume"
                    if interruption.after_step():
                        break
                    rung = "running"
            if interruption is not None:
                if interruption.resume.thorough:
                    until_half.close()
                    engine = stack.enter_context(_engine(task, layout, standard, traffic))
                interruption.go_on(emptied(engine))
                rung = "running"
                for batch in engine.batches():
                    step = batch.step
                    watching.before(batch)
                    if watching.astray:
                        break
                    watching.after(batch, engine.step(batch))
            return watching.finish()
    except WrongUse as refusal:
        if step > 0:  # what cannot work does not work from the beginning
            raise Stopped(f"refused in step {step}: {refusal}", traceback.format_exc(), step, calls, [], rung) from None
        raise
    except Exception as error:
        seen = watching.told.differences if isinstance(watching, Witness) else []
        raise Stopped(f"{type(error).__name__}: {error}", traceback.format_exc(), step, calls, seen, rung) from None


def _engine(task: Hostile, layout: Layout, standard: Standard, traffic: Traffic) -> Engine:
    engine = Engine(task, layout, device="cpu", timeout=TIMEOUT, traffic=traffic)
    engine.spread.probe.compares = False  # the proof itself will tell, and where
    if layout.tp == 1:
        engine.spread.probe.untried.clear()
    task.proof_trial.moment = engine.spread.moment
    _steady(engine, standard)
    return engine


def _slots(world: int) -> list[list[Slot]]:
    return [[Slot(memory) for memory in memories] for memories in MEMORY[:world]]
