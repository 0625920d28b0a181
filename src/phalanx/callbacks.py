"""Callbacks: what is done beside training, at named moments of it. The base class, and three that are ready.

A task gives its own with `Task.callbacks`. They are called on every rank, in the order in which they are given, and may
look at everything the `Engine` has. What all ranks must do alike may depend only on what all ranks have alike: the
step, the metrics, the measures. Whatever else one of them decides goes through `Engine.stop`, which all ranks heed
after the same step.

Where sites train by themselves (``comm=local:H``, ``comm=diloco:H``) metrics and gradients are those of a rank's own
site. All ranks have alike the step, ``metrics.round``, evaluations, checkpoints and `Engine.whole_weights`, which are
what all sites last agreed on.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx.errors import WrongUse, closest

if TYPE_CHECKING:
    from phalanx.train.engine import Engine
    from phalanx.train.step import Metrics


class Callback:
    """Give the methods that are needed: each one does nothing here."""

    def on_model(self, weights: Sequence[str]) -> None:
        """The model is known: the names of all weights that are trained, the same on every rank."""

    def on_start(self, engine: Engine) -> None:
        """Training is about to begin, or to go on from a state that has been restored."""

    def on_rehearsal(self, engine: Engine, measures: Mapping[str, float]) -> None:
        """A run's first batch of held-out data was evaluated, before its first step, for mistakes to show then."""

    def trains(self, step: int, weight: str) -> bool:
        """Whether a step updates a weight. Must follow from the two alone."""
        return True

    def on_gradients(self, engine: Engine, divisor: float, without: set[str]) -> None:
        """Gradients are summed over all ranks, those of a site where it trains by itself, neither divided nor clipped.

        ``engine.whole_gradients(divisor, without)`` has them whole, where all ranks ask for them.
        """

    def before_update(self, engine: Engine) -> None:
        """Weights and moments are about to change."""

    def on_step(self, engine: Engine, metrics: Metrics) -> None:
        """A step is done; ``metrics.skipped`` says if it changed nothing.

        Where sites train by themselves that is this rank's site alone; ``metrics.round`` is of all, where they agree.
        """

    def on_evaluation(self, engine: Engine, measures: Mapping[str, float]) -> None:
        """All held-out data was evaluated, after step ``engine.step_number``."""

    def on_checkpoint(self, engine: Engine, step: int, where: str) -> None:
        """The state after so many steps is whole on disk. Called between two steps, some steps later."""

    def on_end(self, engine: Engine) -> None:
        """The run is finished: its weights are in its folder."""

    def close(self) -> None:
        """The rank ends, or a loop of your own closes its engine: the run is finished, stopped, or has failed."""

    def state_dict(self) -> dict[str, Any]:
        """What to go on with after a resume: numbers, text, lists, dicts with text as keys; the same on all ranks.

        Of sites that train by themselves the first rank's is kept, for all.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""

    def tensors(self) -> dict[str, Tensor] | None:
        """By weight, a tensor in the shape of this rank's part of it (``engine.spread.weights[name].shard``), or None.

        They are saved as the optimizer's moments are, for any layout to go on with, and written whole to the run's
        ``final`` folder. It must be the same dict whenever it is asked for: what is restored is put there.
        """
        return None

    def evaluates_with(self) -> Mapping[str, Tensor]:
        """By weight, what evaluations compute with in place of this rank's part of it."""
        return {}


class EarlyStopping(Callback):
    """End the run when a measure of the held-out data has not improved in ``patience`` evaluations in a row.

    The step after that evaluation is the last one.
    """

    def __init__(self, measure: str = "loss", patience: int = 3, min_delta: float = 0.0, mode: str = "min") -> None:
        """``min_delta``: what improves it by no more than that does not count. ``mode``: ``min`` or ``max``."""
        if mode not in ("min", "max"):
            raise WrongUse(f'EarlyStopping(mode={mode!r}) is not known. Use mode="min" for a loss, "max" for a score.')
        if patience < 1:
            raise WrongUse(f"EarlyStopping(patience={patience}) would stop at once. Use a patience of 1 or more.")
        if not 0 <= min_delta < math.inf:
            raise WrongUse(f"EarlyStopping(min_delta={min_delta}) is no difference. Use a number from 0 up.")
        self.measure, self.patience, self.min_delta, self.mode = measure, patience, min_delta, mode
        self.best: float | None = None
        self.waited = 0
        """Evaluations since it was that."""

    def on_start(self, engine: Engine) -> None:
        """Refuse where nothing would ever be evaluated."""
        kind = type(engine.task).__name__
        if engine.held_out is None:
            raise WrongUse(f"EarlyStopping needs held-out data, and {kind} has none. Give it a held_out().")
        if not engine.task.evaluate_every:
            raise WrongUse(
                f"EarlyStopping looks at evaluations between steps, and {kind} has none: evaluate_every is 0. Set it, "
                "for example to 100."
            )

    def on_rehearsal(self, engine: Engine, measures: Mapping[str, float]) -> None:
        """Refuse a measure that is misspelt; one that a batch alone does not have may be in others."""
        if difflib.get_close_matches(self.measure, measures, n=1, cutoff=0.8):
            self._check(measures)

    def _check(self, measures: Mapping[str, float]) -> None:
        if self.measure not in measures:
            raise WrongUse(
                f"EarlyStopping watches {self.measure!r}, which evaluations do not measure; "
                f"{closest(self.measure, measures)}"
            )

    def on_evaluation(self, engine: Engine, measures: Mapping[str, float]) -> None:
        """Count what did not improve."""
        self._check(measures)
        value = measures[self.measure]
        if self._improved(value):
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            best = "none was a number" if self.best is None else f"the best was {self.best:.6g}"
            engine.stop(f"{self.measure} has not improved in {self.waited} evaluations ({best}, the last {value:.6g})")

    def _improved(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        gained = math.inf if self.best is None else self.best - value if self.mode == "min" else value - self.best
        return gained > self.min_delta

    def state_dict(self) -> dict[str, Any]:
        """What has been seen."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]


class EMA(Callback):
    """An exponential moving average of the trained weights: ``decay * average + (1 - decay) * weight`` a step.

    Each rank averages its own part. The whole is in ``final/ema.safetensors`` at the end of a run. Steps that were
    skipped do not count.
    """

    def __init__(self, decay: float = 0.999, evaluate: bool = False) -> None:
        """``evaluate``: held-out data is evaluated with the average instead of the weights."""
        if not 0 <= decay < 1:
            raise WrongUse(f"EMA(decay={decay}) averages nothing. Use a decay from 0 to below 1, such as 0.999.")
        self.decay, self.evaluate = decay, evaluate
        self.averages: dict[str, Tensor] = {}

    def on_start(self, engine: Engine) -> None:
        """Refuse two to evaluate with."""
        if sum(isinstance(each, EMA) and each.evaluate for each in engine.callbacks.tasks) > 1:
            raise WrongUse(
                f"{type(engine.task).__name__} has several EMA(evaluate=True), and evaluations are made with one "
                "average. Leave evaluate=True to one of them."
            )

    @torch.no_grad()
    def before_update(self, engine: Engine) -> None:
        """The first time, begin with the weights as they are."""
        for name, weight in engine.spread.weights.items():
            if weight.trainable and name not in self.averages:
                self.averages[name] = weight.shard.detach().clone()

    @torch.no_grad()
    def on_step(self, engine: Engine, metrics: Metrics) -> None:
        """Average."""
        if not metrics.skipped:
            for name, average in self.averages.items():
                average.lerp_(engine.spread.weights[name].shard.detach(), 1 - self.decay)

    def tensors(self) -> dict[str, Tensor]:
        """The average of this rank's part of each weight."""
        return self.averages

    def evaluates_with(self) -> Mapping[str, Tensor]:
        return self.averages if self.evaluate else {}


class Freeze(Callback):
    """Leave weights as they are in some steps: no gradient, no weight decay, no momentum.

    Freeze("encoder.*", until=1000)            not trained in the first 1000 steps
    Freeze(["norm*", "*.bias"], since=500)     not trained from the 501st step on
    """

    def __init__(self, pattern: str | Sequence[str], until: int | None = None, since: int = 0) -> None:
        """``pattern``: names of weights, with ``*`` for anything; one, or several. Steps count from 0."""
        self.patterns = [pattern] if isinstance(pattern, str) else list(pattern)
        self.since, self.until = since, until
        if since < 0 or (until is not None and until <= since):
            raise WrongUse(
                f"Freeze({pattern!r}, since={since}, until={until}) freezes nothing in any step. Let since be 0 or "
                "more, and until beyond it."
            )
        self._weights: frozenset[str] = frozenset()

    def on_model(self, weights: Sequence[str]) -> None:
        """Find out which weights are meant."""
        matched = {pattern: [name for name in weights if fnmatchcase(name, pattern)] for pattern in self.patterns}
        for pattern, names in matched.items():
            if not names:
                raise WrongUse(
                    f"Freeze({pattern!r}) matches no weight that is trained (* is anything, as in 'encoder.*'); "
                    f"{closest(pattern, weights)}"
                )
        self._weights = frozenset(name for names in matched.values() for name in names)

    def trains(self, step: int, weight: str) -> bool:
        """Whether the weight is another, or the step is before or after."""
        return weight not in self._weights or not self.since <= step < (math.inf if self.until is None else self.until)
