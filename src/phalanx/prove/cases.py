"""Making a case: the task shrunk and made hostile, its reference, and how much rounding it bears."""

from __future__ import annotations

import copy
import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from phalanx import user_code
from phalanx.comm import AUTO
from phalanx.errors import CannotHere, WrongUse
from phalanx.layout import Layout
from phalanx.parallel.weights.blueprint import Blueprint
from phalanx.parallel.weights.placement import Placement
from phalanx.precision import DTYPES
from phalanx.prove.explanation.sites import location
from phalanx.prove.ladder import Standard, off, size
from phalanx.prove.layouts import MICRO_BATCHES, as_proven
from phalanx.prove.own_faults import described
from phalanx.prove.ranks import trial
from phalanx.prove.ranks.trial import Case
from phalanx.prove.reference.activations import chunked, round_activations, rounding, shares
from phalanx.prove.reference.coded import Coded
from phalanx.prove.reference.failing import Unprovable, check_apart, check_certifies, failed
from phalanx.prove.reference.hostile import BATCH, Hostile, Trial, hostile, ignorable, vocabularies
from phalanx.prove.reference.loop import Reference
from phalanx.prove.reference.low_rank import Projected
from phalanx.prove.reference.one_step import Step
from phalanx.prove.reference.onebit import OneBit
from phalanx.prove.reference.sites import EverySite, boundary
from phalanx.prove.reference.steady import Decisions
from phalanx.prove.reference.switched import Switching
from phalanx.task import Precision, Task
from phalanx.train.check.beside import Checked
from phalanx.train.check.checking import why_not_a_sum, why_not_repeated
from phalanx.train.check.learning import FUNCTION, TWICE
from phalanx.train.check.sums import DIVIDED, SUM, TOGETHER
from phalanx.train.shrink import Needs, Shrunk, not_made_smaller, shortened, shrunk_ways

NUDGES = (1, 2)
Loops = TypeVar("Loops", Reference, EverySite)
SLOW_SECONDS = 1.0
"""A step on one device that takes longer is made shorter, if it can be."""


@dataclass
class Docket:
    """The cases that some layouts need, each made once."""

    task: Task
    steps: int
    ranks: int
    tell: Callable[[str], None] = lambda text: None
    """Told what is being done, while there is nothing else to show."""
    cases: list[Case] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was shrunk."""
    checked: Checked = field(default_factory=Checked)
    """What the check of the task on one device came to."""
    hostility: list[str] = field(default_factory=list)
    """What was made awkward."""
    attributes: frozenset[str] = field(init=False)
    """What the task had before anything was asked of it."""
    _tasks: dict[Needs, tuple[Task, bool, bool]] = field(default_factory=dict)
    _numbers: dict[tuple[Needs, int, Layout | None], int] = field(default_factory=dict)
    _narrow: dict[tuple[int, str], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.attributes = frozenset(vars(self.task))

    @property
    def batch(self) -> int:
        """Samples of a step: no multiple of ranks, and more than two for each."""
        return BATCH if self.ranks <= 8 else 2 * self.ranks + 1

    @property
    def half(self) -> int:
        """The step before which a run is interrupted."""
        return Trial(self.steps).half

    def number(self, layout: Layout) -> int:
        """The case that a layout is held against; made if there is none yet."""
        try:
            return self._number(layout)
        except (WrongUse, CannotHere, Unprovable):
            raise
        except Exception as error:
            raise failed(self.task, Needs.of([layout]), error) from error

    def _number(self, layout: Layout) -> int:
        needs = Needs.of([layout])
        if needs not in self._tasks:
            task, tried = self._prepared(needs)
            self._tasks[needs] = task, tried.couples_samples, tried.at_once
        task, couples, at_once = self._tasks[needs]
        run = as_proven(layout, task.global_batch, at_once) if rounding(layout) else None
        if at_once or couples:
            check_apart(task, layout, chunked(layout))
        key = needs, self._groups(layout), run
        if key not in self._numbers:
            self._numbers[key] = len(self.cases)
            self.cases.append(self._case(task, key[1], at_once, run))
        return self._numbers[key]

    def _case(self, task: Task, groups: int, at_once: bool, run: Layout | None) -> Case:
        if run is None or run.local is None:
            return Case(task, self._standard(task, groups, run), groups, at_once)
        standards = self._of_sites(task, run)
        return Case(task, standards[0], groups, at_once, standards, boundary(run.local, self.half, task.steps))

    def _of_sites(self, task: Task, layout: Layout) -> list[Standard]:
        """What each site is held against."""
        blueprint = Blueprint(task.model, task.seed)
        placement = Placement.of(blueprint.model, task.anatomy(blueprint.model), layout.site)
        reference = self._run(EverySite(task, layout, placement), "to compare with")
        made = [site.decisions for site in reference.sites]
        nudged = [
            self._run(EverySite(task, layout, placement, nudge, made), f"one rounding off ({nudge} of {len(NUDGES)})")
            for nudge in NUDGES
        ]
        found = [
            Standard.measured(site, [other.sites[number] for other in nudged])
            for number, site in enumerate(reference.sites)
        ]
        for standard in found:
            check_certifies(task, standard)
        return found

    def known(self, layout: Layout) -> int | None:
        """The case that a layout is held against, if there is one."""
        needs = Needs.of([layout])
        return self._numbers.get((needs, self._groups(layout), None)) if needs in self._tasks else None

    def _groups(self, layout: Layout) -> int:
        """Micro-batches of the reference: as many as the layout has, if it matters which samples are together."""
        task, couples, at_once = self._tasks[Needs.of([layout])]
        return as_proven(layout, task.global_batch, at_once).micro_batches(task.global_batch) if couples else 1

    def narrow(self, number: int, dtype: Precision) -> int:
        """The same case in a narrow dtype: how far one device itself is off there sets what a layout may be."""
        key = number, dtype
        if key not in self._narrow:
            case = self.cases[number]
            task = copy.copy(case.task)
            object.__setattr__(task, "precision", dtype)
            unlimited = replace(case.standard, bar=math.inf, limits={})
            self.cases.append(Case(task, unlimited, case.micro_batches, case.at_once))
            self._narrow[key] = len(self.cases) - 1
            trial.CASES[:] = self.cases
            each = -(-task.global_batch // max(MICRO_BATCHES, case.micro_batches))
            told = trial.attest(self._narrow[key], Layout(micro_batch=each), None)
            self.cases[-1].standard = case.standard.narrowed(told.errors, torch.finfo(DTYPES[dtype].compute).eps)
        return self._narrow[key]

    def _prepared(self, needs: Needs) -> tuple[Task, Reference]:
        """A task whose targets are ignored unevenly and whose gradients are clipped, and all its steps without that.

        A smaller configuration that does not work is another one's turn, and never the task's fault.
        """
        errors: list[Exception] = []
        for small in self._shrunk(needs):
            before = list(self.notes)
            try:
                return self._prepared_so(small)
            except (WrongUse, CannotHere, Unprovable):
                raise
            except Exception as error:
                if not small.by_config:
                    raise
                errors.append(error)
                self.notes[:] = before
        raise not_made_smaller(self.task, errors[0]) from errors[0]

    def _prepared_so(self, small: Shrunk) -> tuple[Task, Reference]:
        for note in small.notes:
            if note not in self.notes:
                self.notes.append(note)
        task, terms = self._hostile(small)
        object.__setattr__(task, "clip", math.inf)
        reference = self._run(Reference(task), "to see the norms")
        steps = reference.steps
        first = steps[0]
        if first.skipped:
            raise Unprovable(
                f"the first step of {type(task).__name__} on one device has a loss of {first.total} over "
                f"{first.count:g} terms: there is nothing to compare",
                "Mend that first: is a target out of range, a log of 0, an input not finite?",
            )
        norms = [step.norm for step in steps if not step.skipped]
        between = math.sqrt(min(norms) * max(norms))  # so that some are clipped and some are not
        object.__setattr__(task, "clip", between if max(norms) > 1.001 * min(norms) else 0.5 * first.norm)
        idle = reference.decisions.idle
        ignored = f"targets ignored unevenly ({', '.join(terms.ignorable)}); " if terms.ignorable else ""
        terms.together = reference.gathers or reference.sums
        cut = "micro-batches (a pipeline's in one)" if reference.at_once else "micro-batches"
        self.hostility = [
            f"{task.global_batch} samples a step and {terms.size} an epoch, in {cut} and buckets; clipped",
            f"weights, biases and norms disturbed; {ignored}one sample's loss not a number in step {terms.poisoned}",
            f"interrupted before step {terms.half}, saved, and resumed by an engine made anew",
            *([f"half of the experts get no token in step {idle.step}"] if idle else []),
            *(["weights that begin frozen are so in the first step alone"] if reference.turns.begin_frozen else []),
        ]
        return task, reference

    def _shrunk(self, needs: Needs) -> Iterator[Shrunk]:
        try:
            yield from shrunk_ways(self.task, needs)
        except (WrongUse, CannotHere):
            raise
        except Exception as error:
            if any(map(user_code.is_users, (frame.filename for frame in traceback.extract_tb(error.__traceback__)))):
                raise
            summary, lines, advice = described("making the task small", traceback.format_exc())
            advice = f"{advice} Until then give the task a tiny(), a small copy of itself with the same structure."
            raise Unprovable(summary, advice, code=3, evidence=lines) from error

    def _hostile(self, small: Shrunk) -> tuple[Task, Trial]:
        """A task under trial; one that computes for long, with shorter sequences."""
        terms = Trial(
            self.steps, self.batch, length=small.length, vocabulary=small.vocabulary, special=small.special,
            attributes=self.attributes,
        )  # fmt: skip
        task = hostile(small.task, terms)
        reference = Reference(task)
        seconds, shorter = SLOW_SECONDS + 1, shortened(task, reference.model)
        for _ in range(2):  # the first step may also import what it needs
            if seconds > SLOW_SECONDS:
                began = time.perf_counter()
                self._run(reference, "first", 1)
                seconds = time.perf_counter() - began
        if seconds > SLOW_SECONDS and shorter is not None:
            self.notes.append(f"length -> {shorter}, since a step took {seconds:.1f} s on one device")
            try:
                return self._hostile(replace(small, length=shorter))
            except Exception:  # what is cut off must not be missing, such as the places of a picture
                self.notes.pop()
        _look(reference, terms)
        return task, terms

    def _note(self, text: str) -> None:
        """Say something of how the task is proven, once."""
        self.hostility += [] if text in self.hostility else [text]

    def _run(self, reference: Loops, which: str, steps: int | None = None) -> Loops:
        """A reference to its end, or so many steps on, each told."""
        every = reference.task.steps if steps is None else len(reference.steps) + steps
        began = time.perf_counter()
        while len(reference.steps) < every:
            done = len(reference.steps)
            each = f", {(time.perf_counter() - began) / done:.1f} s each" if done else ""
            self.tell(f"one device, run {which}: step {done + 1} of {every}{each}")
            reference.run(1)
        return reference

    def _standard(self, task: Task, groups: int, layout: Layout | None) -> Standard:
        """``layout``: one whose sums are in few bits, if they are."""

        def made_anew(nudge: int = 0, decisions: Decisions | None = None) -> Reference:
            coded = defined(task, layout) if layout is not None and layout.coded_axis else None
            observe = None if layout is None else partial(round_activations, task, layout)
            own = partial(shares, layout) if layout is not None and chunked(layout) else None
            return Reference(task, groups, nudge, observe, decisions, coded, own if coded is None else None)

        reference = self._run(made_anew(), "to compare with")
        made = reference.decisions
        _check_function(task, self.task)
        again = self._run(made_anew(), "a second time").steps
        _check_repeats(task, self.task, reference.steps, again)
        nudged = [self._run(made_anew(nudge, made), f"one rounding off ({nudge} of {len(NUDGES)})") for nudge in NUDGES]
        standard = Standard.measured(reference, nudged)
        if made.lifted:
            self._note("casts to a lower precision inside of the model are left out")
        assert isinstance(task, Hostile)
        if task.proof_trial.lifted:
            self._note("losses and measures are computed in float64, also where the task's code asks for float32")
        if standard.unsteady:
            unsteady = ", ".join(standard.unsteady)
            self._note(f"one rounding changes what held-out data gives, so it is not compared: {unsteady}")
        check_certifies(task, standard)
        if not reference.couples_samples and not reference.at_once and layout is None:
            _check_sum_of_samples(task, self.task, standard)
        return standard


def defined(task: Task, layout: Layout) -> Coded:
    """What a layout's ``comm`` means, for a run of a task."""
    blueprint = Blueprint(task.model, task.seed)
    kind = {"onebit": OneBit, "powersgd": Projected, AUTO: Switching}.get(layout.comm.partition(":")[0], Coded)
    placement = Placement.of(blueprint.model, task.anatomy(blueprint.model), layout)
    return kind(layout, placement, task.global_batch, task.steps)


def _look(reference: Reference, trial: Trial) -> None:
    """Find out what may be done to a task's columns."""
    slots = np.arange(reference.order.slots(0))
    batch, _ = reference.batch(0, slots)
    ended = vocabularies(reference.model, batch)
    with reference.randomness.scope("task"):
        output = reference.output(0, slots, batch)
        found = ignorable(reference.task, batch, output)
    trial.spread = ended()
    logits = getattr(output, "logits", output)
    classes = logits.shape[-1] if hasattr(logits, "shape") and len(logits.shape) else 0
    if classes in trial.spread.values():
        trial.spread |= dict.fromkeys(found, classes)
    trial.ignorable = found


def _check_function(task: Task, given: Task) -> None:
    """The same batch must give the same, however often it is computed. ``given``: the task as the user has it."""
    reference = Reference(task)
    slots = np.arange(reference.order.slots(0))
    buffers = {name: buffer.clone() for name, buffer in reference.model.named_buffers()}
    totals = []
    for _ in range(2):
        for name, buffer in reference.model.named_buffers():
            buffer.copy_(buffers[name])
        totals.append(reference.loss(0, slots, reference.batch(0, slots)[0])[0].item())
    if totals[0] != totals[1]:
        raise Unprovable(f"{type(task).__name__} {TWICE}", why_not_repeated(given) or f"{FUNCTION}.")


def _check_repeats(task: Task, given: Task, once: Sequence[Step], again: Sequence[Step]) -> None:
    """One device must do the same twice."""
    for number, (a, b) in enumerate(zip(once, again, strict=True)):
        if a.read != b.read:
            raise Unprovable(
                f"{type(task).__name__} is not deterministic: reading the same samples of step {number} twice gives "
                "different ones",
                "Draw from torch's, numpy's or Python's global generators in Task.data, which are seeded for every "
                "sample, or seed your own in a method reseed(self, seed) of the data set.",
            )
        if any(not _equal(a.weights[name], b.weights[name]) for name in a.weights) or a.total != b.total != math.nan:
            if a.skipped and b.skipped:
                continue
            raise Unprovable(
                f"{type(task).__name__} is not deterministic: step {number} run twice on one device gives different "
                "weights",
                why_not_repeated(given) or f"{FUNCTION}.",
            )


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(a.nan_to_num(), b.nan_to_num()))


def _check_sum_of_samples(task: Task, given: Task, standard: Standard) -> None:
    """A loss must be a sum over samples: then it does not matter which of them are computed together."""
    assert isinstance(task, Hostile)
    step = standard.steps[0]
    total: dict[str, Any] = {}
    for gradients in Reference(task, decisions=standard.decisions).gradients_by_slot(0):
        total = {name: total.get(name, 0) + gradient for name, gradient in gradients.items()}
    scale = max(map(size, step.gradients.values()))
    for name, want in step.gradients.items():
        if want is None:
            continue
        error = off(total[name] / step.count, want, size(want), scale)
        if error > standard.bar:
            raise Unprovable(
                f"the loss of {type(task).__name__} {TOGETHER}: on one device the gradients of single samples do not "
                f"add up to the batch's ({name} is off by {error:.1e}), {DIVIDED}",
                why_not_a_sum(given) or f"{SUM} ({location(super(Hostile, task).loss)}).",
            )


def applicable(task: Task, layout: Layout, model: Any, anatomy: Any) -> str | None:
    """Why a layout cannot work for a task, or None."""
    try:
        layout.check(task.global_batch, layout.world)
        Placement.of(model, anatomy, layout)
    except WrongUse as refusal:
        return str(refusal)
    return None
