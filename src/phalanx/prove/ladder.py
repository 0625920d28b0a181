"""The ladder: what is compared, in the order in which a step does it, and when two values are the same.

In float64 two right layouts differ by rounding alone. How far that may take a task is measured on one device, by
beginning one rounding off (`Standard.measured`); a difference beyond the bar that follows from it is a finding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from phalanx.prove.reference.evaluation import Measures, off_by
from phalanx.prove.reference.failing import MOST_BAR
from phalanx.prove.reference.loop import Reference
from phalanx.prove.reference.one_step import Step
from phalanx.prove.reference.steady import Decisions

RUNGS = (
    "running", "settings", "initial weights", "communication", "samples", "random draws", "activations", "loss",
    "gradients of activations", "gradients before reduction", "gradients", "gradient norm", "clip factor", "skipping",
    "given gradients", "moments", "weights", "buffers", "weights in use", "evaluation", "agreement of ranks",
    "resume", "resume elsewhere", "ledger",
)  # fmt: skip
"""Whoever fails first in a step is where to look. A run is resumed after the last of the step before."""
RESUMING = RUNGS[RUNGS.index("resume") :]
SAME_AS = {"weights in use": "weights"}
"""Rungs whose values one device has under another name."""
LEAST_BAR = 1e-12
MOST_BUFFER_BAR = 1e-7
"""Running means follow weights whose gradients are rounding alone, as of a bias in front of a batch-norm."""
MARGIN = 64
"""How much further than a nudge by one rounding a right layout may be: it rounds in every sum, not once."""


NOISE = 1e-12
NARROW_MARGIN = 8
"""The same in a narrow dtype, where every operation's rounding is already in what was measured."""


@dataclass(frozen=True)
class Difference:
    """A value that is not what one device has."""

    step: int
    rung: str
    name: str
    """The tensor, module or setting."""
    error: float
    """Of a tensor: the norm of what is wrong by the norm of what is right. Others differ (inf) or do not."""
    rank: int
    found: str = ""
    expected: str = ""

    @property
    def place(self) -> tuple[int, int]:
        return self.step, RUNGS.index(self.rung)


def first(differences: Iterable[Difference]) -> list[Difference]:
    """Those of the first rung that fails, the largest first."""
    found = list(differences)
    least = min((d.place for d in found), default=None)
    return sorted((d for d in found if d.place == least), key=lambda d: -d.error)


def size(tensor: Tensor | None) -> float:
    """A tensor's norm; 0 if there is none."""
    return 0.0 if tensor is None or not tensor.numel() else float(torch.linalg.vector_norm(tensor.double()))


def off(found: Tensor, expected: Tensor, whole: float, scale: float) -> float:
    """How far ``found`` is from ``expected``, a part of what has norm ``whole`` among others of up to ``scale``.

    A tensor that is next to nothing beside the others is nothing but rounding, hence a share of their scale.
    """
    if found.shape != expected.shape:
        return math.inf
    if not found.numel():
        return 0.0
    error = size(found.double() - expected.double())
    if error == 0:
        return 0.0
    error /= whole + 1e-3 * scale or 1.0
    return math.inf if math.isnan(error) else error


@dataclass
class Standard:
    """What a layout's run is held against: one device's steps, and how far rounding alone may take it from them."""

    initial: dict[str, Tensor]
    """Weights and buffers."""
    steps: list[Step]
    decisions: Decisions
    saved: frozenset[str]
    """What a saved model consists of."""
    noise: frozenset[str]
    """Weights whose gradient is nothing but rounding, as of a bias in front of a batch-norm: so is all that follows."""
    sensitivity: float
    """What one rounding at the beginning becomes."""
    bar: float
    buffer_bar: float = 0.0
    buffer_sensitivity: float = 0.0
    """The same of buffers."""
    evaluation: Measures | None = None
    """One device's, before the last step; of what rounding alone does not change by much."""
    evaluation_bar: float = 0.0
    unsteady: tuple[str, ...] = ()
    """What rounding does change in an evaluation, as a choice between equals: it cannot be compared."""
    limits: dict[tuple[int, str], float] | None = None
    """In a narrow dtype, by step and rung: what one device itself is off by, and some."""
    norms: dict[tuple[int, str, str], float] = field(default_factory=dict)
    scales: dict[tuple[int, str, str], float] = field(default_factory=dict)

    @classmethod
    def measured(cls, reference: Reference, nudged: Sequence[Reference]) -> Standard:
        standard = cls(
            reference.initial | reference.initial_buffers, reference.steps, reference.decisions, reference.saved,
            frozenset(), 0.0, 0.0,
        )  # fmt: skip
        standard._weigh()
        standard.noise = standard._noise()
        errors, buffers = [0.0], [0.0]
        for other in nudged:
            for number, step in enumerate(other.steps):
                for tensor in _tensors(step):
                    (buffers if tensor[0] == "buffers" else errors).append(standard.error(number, *tensor))
        standard.sensitivity = max(errors)
        standard.bar = max(LEAST_BAR, MARGIN * standard.sensitivity)
        standard.buffer_sensitivity = max(buffers)
        standard.buffer_bar = max(standard.bar, MARGIN * standard.buffer_sensitivity)
        standard._measure(reference.evaluation, [other.evaluation for other in nudged])
        return standard

    def _measure(self, evaluation: Measures | None, nudged: Sequence[Measures | None]) -> None:
        """What of an evaluation can be compared, and how closely."""
        self.evaluation, self.evaluation_bar = evaluation, self.bar
        if evaluation is None:
            return
        others = [dict(other.items()) for other in nudged if other is not None]
        for name, want in evaluation.items():
            error = max((off_by(other[name], want) for other in others), default=0.0)
            if MARGIN * error > MOST_BUFFER_BAR:
                self.unsteady = (*self.unsteady, name)
            else:
                self.evaluation_bar = max(self.evaluation_bar, MARGIN * error)

    def limit(self, step: int, rung: str) -> float:
        """What is off by more than this is a finding."""
        rung = SAME_AS.get(rung, rung)
        if self.limits is None and rung == "evaluation":
            return self.evaluation_bar
        if self.limits is None:
            return self.buffer_bar if rung == "buffers" else self.bar
        return self.limits.get((step, rung), self.bar)

    def narrowed(self, errors: Mapping[tuple[int, str], float], eps: float) -> Standard:
        """The same reference for a run in a narrow dtype, of which one device has these ``errors``."""
        limits = {key: max(eps, NARROW_MARGIN * error) for key, error in errors.items()}
        return replace(self, bar=eps, limits=limits)

    @property
    def certifies(self) -> bool:
        """Whether rounding stays so small that a bug cannot hide in it."""
        return self.bar <= MOST_BAR and self.buffer_bar <= MOST_BUFFER_BAR

    def _weigh(self) -> None:
        """Norms of all that a run will be held against."""
        for number, step in enumerate(self.steps):
            for rung, name, tensor in _tensors(step):
                norm = size(tensor)
                self.norms[number, rung, name] = norm
                kind = _kind(rung, name)
                self.scales[number, rung, kind] = max(norm, self.scales.get((number, rung, kind), 0.0))

    def _noise(self) -> frozenset[str]:
        found = set(self.steps[0].gradients)
        for number, step in enumerate(self.steps):
            if not step.skipped:
                scale = self.scales.get((number, "gradients", ""), 0.0)
                found &= {n for n in found if 0 < self.norms[number, "gradients", n] < NOISE * scale}
        return frozenset(found)

    def expected(self, step: int, rung: str, name: str) -> Tensor | None:
        found = self.steps[step]
        if rung == "moments":
            weight, _, moment = name.rpartition(" ")
            return found.moments[weight].get(moment)
        if rung == "given gradients":
            return found.clipped(name)
        return {"gradients": found.gradients, "weights": found.weights, "buffers": found.buffers}[rung].get(name)  # type: ignore[attr-defined]

    def error(self, step: int, rung: str, name: str, found: Tensor | None, part: Any = None) -> float:
        """Of a tensor, or of its ``part``, a function from the whole to what was ``found``."""
        in_use = self.steps[step].in_use if rung == "weights in use" else None
        rung = SAME_AS.get(rung, rung)
        expected = self.expected(step, rung, name) if in_use is None else in_use[name]
        if rung != "gradients" and name.split(" ")[0] in self.noise:
            return 0.0
        if found is None or expected is None:
            return 0.0 if found is expected else math.inf
        if not expected.is_floating_point():
            expected = expected if part is None else part(expected)
            return 0.0 if torch.equal(found.to(expected.dtype), expected) else math.inf
        whole, scale = self.norms[step, rung, name], self.scales[step, rung, _kind(rung, name)]
        return off(found, expected if part is None else part(expected), whole, scale)


def _kind(rung: str, name: str) -> str:
    """Tensors whose norms can be held against each other."""
    return name.rpartition(" ")[2] if rung == "moments" else ""


def _tensors(step: Step) -> list[tuple[str, str, Tensor | None]]:
    """All that a step left, by rung and name; nothing of a step that was skipped but its state."""
    found: list[tuple[str, str, Tensor | None]] = []
    if not step.skipped:
        found += [("gradients", name, g) for name, g in step.gradients.items()]
        found += [("given gradients", name, step.clipped(name)) for name in step.gradients]
    for name, moments in step.moments.items():
        found += [("moments", f"{name} {moment}", value) for moment, value in moments.items()]
    found += [("weights", name, weight) for name, weight in step.weights.items()]
    return found + [("buffers", name, buffer) for name, buffer in step.buffers.items()]
