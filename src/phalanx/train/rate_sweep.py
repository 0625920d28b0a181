"""The learning rate found by trying: a sweep from a low rate to a high one, a step each, until the loss diverges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from phalanx.errors import WrongUse
from phalanx.train.engine import Engine
from phalanx.train.job import Job
from phalanx.train.trying import attempt
from phalanx.watch.chart import chart

SMOOTHING = 0.9
"""So much of the mean of the losses before is kept with each."""
FEWEST = 10
"""Steps of a sweep."""
FALL = 0.02
"""Of the first loss: one that falls by less has not fallen."""


@dataclass(frozen=True)
class Sweep:
    """What each rate came to."""

    rates: list[float]
    losses: list[float]
    smoothed: list[float]
    asked: float
    """The rate that the optimizer has without a schedule."""
    diverged: bool

    @property
    def _best(self) -> int:
        return min(range(len(self.smoothed)), key=self.smoothed.__getitem__)

    @property
    def falls(self) -> bool:
        """Whether the loss falls at all."""
        if not self.smoothed or self._best < 2:
            return False
        return self.smoothed[0] - self.smoothed[self._best] > FALL * abs(self.smoothed[0])

    @property
    def lowest(self) -> float:
        """The rate with the lowest smoothed loss, which is close to those that diverge."""
        return self.rates[self._best]

    @property
    def steepest(self) -> float:
        """The rate at which the smoothed loss falls most, by the rate's logarithm."""
        return self.rates[_steepest(self.smoothed[: self._best + 1])]

    @property
    def suggested(self) -> float | None:
        """The lesser of the steepest and a tenth of the lowest; None where the loss does not fall."""
        return max(self.rates[0], min(self.steepest, self.lowest / 10)) if self.falls else None

    def drawn(self, encoding: str | None = "utf-8") -> list[str]:
        """The smoothed loss over the rates, in a few lines."""
        lines = chart(self.smoothed, encoding=encoding)
        if not lines:
            return []
        axis = lines[-1]
        start, end = f"{self.rates[0]:.1e}", f"{self.rates[-1]:.1e}"
        label = axis.index("step")
        return [*lines[:-1], axis[:label] + start + f"{end:>{max(len(end) + 2, len(axis) - label - len(start))}}"]


def _steepest(values: Sequence[float]) -> int:
    """The place with the steepest fall, measured over some of its neighbours."""
    reach = max(1, len(values) // 10)
    slopes = {
        place: (values[min(len(values) - 1, place + reach)] - values[max(0, place - reach)])
        / (min(len(values) - 1, place + reach) - max(0, place - reach))
        for place in range(len(values))
    }
    return min(slopes, key=slopes.__getitem__)


def rate_at(step: int, low: float, high: float, steps: int) -> float:
    """From low to high, each so many times the one before."""
    return low * (high / low) ** (step / (steps - 1))


def sweep(job: Job, low: float, high: float, steps: int) -> Sweep:
    """Try so many rates on fresh ranks, the model beginning as the task's does."""
    if not 0 < low < high < math.inf:
        raise WrongUse(f"--low {low:g} and --high {high:g} are no sweep. Give 0 < low < high, such as 1e-7 and 1.")
    if steps < FEWEST:
        raise WrongUse(f"--steps {steps} are too few to see a curve. Give {FEWEST} or more, such as 100.")
    if job.task.turns:
        raise WrongUse(
            f"{type(job.task).__name__} takes turns, whose losses are not each other's: no curve could be drawn. Set "
            "its rates by hand."
        )
    program = partial(swept, low=low, high=high, steps=steps)
    return attempt(job, program, job.layout, steps=steps, evaluate_every=0).or_refuse()


def swept(engine: Engine, low: float, high: float, steps: int) -> Sweep:
    """On each rank; all see the same losses, and stop alike."""
    first = engine.optimizer.param_groups[0]
    asked = first["initial_lr"] / first.get("factor", 1.0)
    if not asked:
        raise WrongUse("the optimizer's learning rate is 0, of which no factor is another. Set learning_rate above 0.")
    for group in engine.optimizer.param_groups:
        group.pop("rate", None)  # all rates are swept together
    engine.schedule = lambda step: rate_at(step, low, high, steps) / asked
    found = Sweep([], [], [], asked, diverged=False)
    mean = 0.0
    for number, batch in enumerate(engine.batches()):
        loss = engine.step(batch).loss
        if not math.isfinite(loss):
            return Sweep(found.rates, found.losses, found.smoothed, asked, diverged=True)
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        found.rates.append(rate_at(number, low, high, steps))
        found.losses.append(loss)
        found.smoothed.append(mean / (1 - SMOOTHING ** (number + 1)))
        if has_diverged(found.smoothed):
            return Sweep(found.rates, found.losses, found.smoothed, asked, diverged=True)
    return found


def has_diverged(smoothed: Sequence[float]) -> bool:
    """Whether all that was gained is lost, and the loss is a quarter of the first one above the best."""
    first, best = smoothed[0], min(smoothed)
    return smoothed[-1] > best + max(first - best, 0.25 * abs(first))
