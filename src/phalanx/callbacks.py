"""Callbacks: what is done beside training, at named moments of it. The base class, and those that are ready.

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
from collections.abc import Iterator, Mapping, Sequence
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

    def rate_factor(self) -> float:
        """What all learning rates are multiplied by, beside the schedule's factor: the same on all ranks."""
        return 1.0

    def tensors(self) -> dict[str, Tensor] | None:
        """By weight, a tensor in the shape of this rank's part of it (``engine.spread.weights[name].shard``), or None.

        By buffer, one of its shape.

        They are saved as the optimizer's moments are, for any layout to go on with, and written whole to the run's
        ``final`` folder. It must be the same dict whenever it is asked for: what is restored is put there.
        """
        return None

    def evaluates_with(self) -> Mapping[str, Tensor]:
        """By weight or buffer, what evaluations compute with in place of this rank's part of it."""
        return {}


LOWER = frozenset([
    "error", "errors", "perplexity", "ppl", "nll", "mse", "mae", "rmse", "wer", "cer", "distance", "divergence", "fid",
    "bce", "kl", "regret",
])  # fmt: skip
"""Words in the names of measures of which the lowest is the best, beside all that end in ``loss``."""


class MeasureWatcher(Callback):
    """The base of callbacks that follow one measure of the held-out data, and tell whether it improves."""

    field = ""
    """The field of the task that sets it up, for messages."""

    def __init__(self, measure: str, mode: str, min_delta: float = 0.0) -> None:
        """``mode``: ``min``, ``max``, or ``auto``: ``min`` for a loss or an error by its name, else ``max``.

        What improves by no more than ``min_delta`` does not count.
        """
        kind = type(self).__name__
        if mode not in ("min", "max", "auto"):
            raise WrongUse(f'{kind}(mode={mode!r}) is not known. Use mode="min" for a loss, "max" for a score.')
        if not 0 <= min_delta < math.inf:
            raise WrongUse(f"{kind}(min_delta={min_delta}) is no difference. Use a number from 0 up.")
        self.measure, self.min_delta = measure, min_delta
        self.mode = direction_of(measure) if mode == "auto" else mode
        self.best: float | None = None

    def on_start(self, engine: Engine) -> None:
        """Refuse where nothing would ever be evaluated."""
        kind, name = type(engine.task).__name__, self.field or type(self).__name__
        if engine.held_out is None:
            raise WrongUse(f"{name} needs held-out data, and {kind} has none. Give it a held_out().")
        if not engine.task.evaluate_every:
            raise WrongUse(
                f"{name} looks at evaluations between steps, and {kind} has none: evaluate_every is 0. Set it, for "
                "example to 100."
            )

    def on_rehearsal(self, engine: Engine, measures: Mapping[str, float]) -> None:
        """Refuse a measure that is misspelt; one that a batch alone does not have may be in others."""
        if difflib.get_close_matches(self.measure, measures, n=1, cutoff=0.8):
            self.measured(measures)

    def measured(self, measures: Mapping[str, float]) -> float:
        """The measure's value in an evaluation."""
        if self.measure not in measures:
            raise WrongUse(
                f"{self.field or type(self).__name__} watches {self.measure!r}, which evaluations do not measure; "
                f"{closest(self.measure, measures)}"
            )
        return measures[self.measure]

    def improves(self, value: float) -> bool:
        """Whether a value is better than the best so far; then it is the best."""
        if not math.isfinite(value):
            return False
        gained = math.inf if self.best is None else self.best - value if self.mode == "min" else value - self.best
        if gained > self.min_delta:
            self.best = value
            return True
        return False


def direction_of(measure: str) -> str:
    """``min`` or ``max``, by the name of a measure."""
    words = measure.lower().replace("-", "_").replace("/", "_").split("_")
    return "min" if any(word in LOWER or word.endswith(("loss", "losses")) for word in words) else "max"


class EarlyStopping(MeasureWatcher):
    """End the run when a measure of the held-out data has not improved in ``patience`` evaluations in a row.

    The step after that evaluation is the last one. `KeepBest` beside it has the run end with the best weights.
    """

    def __init__(self, measure: str = "loss", patience: int = 3, min_delta: float = 0.0, mode: str = "min") -> None:
        """``min_delta``: what improves it by no more does not count. ``mode``: ``min``, ``max`` or ``auto``."""
        super().__init__(measure, mode, min_delta)
        if patience < 1:
            raise WrongUse(f"EarlyStopping(patience={patience}) would stop at once. Use a patience of 1 or more.")
        self.patience = patience
        self.waited = 0
        """Evaluations since it was that."""

    def on_evaluation(self, engine: Engine, measures: Mapping[str, float]) -> None:
        """Count what did not improve."""
        value = self.measured(measures)
        if self.improves(value):
            self.waited = 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            best = "none was a number" if self.best is None else f"the best was {self.best:.6g}"
            engine.stop(f"{self.measure} has not improved in {self.waited} evaluations ({best}, the last {value:.6g})")

    def state_dict(self) -> dict[str, Any]:
        """What has been seen."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]


class KeepBest(MeasureWatcher):
    """Keep the checkpoint with the best value of a measure of the held-out data, and end the run with its weights.

    The checkpoint is kept beside those of ``--keep`` until a better one is saved. ``final/`` has its weights at the end
    of the run, and ``phalanx export RUN --best`` exports them. The task's field ``keep_best`` sets one up.
    """

    def __init__(self, measure: str = "loss", mode: str = "auto", min_delta: float = 0.0) -> None:
        """``mode``: ``min``, ``max``, or ``auto``: ``min`` for a loss or an error by its name, else ``max``."""
        super().__init__(measure, mode, min_delta)
        self.step: int | None = None
        """After how many steps it was the best."""

    @classmethod
    def of(cls, text: str) -> KeepBest:
        """As a task's ``keep_best`` says it: ``dice``, ``min:dice`` or ``max:dice``."""
        mode, colon, measure = text.partition(":")
        made = cls(measure, mode) if colon and mode in ("min", "max") else cls(text)
        made.field = f"keep_best={text}"
        return made

    def on_evaluation(self, engine: Engine, measures: Mapping[str, float]) -> None:
        """Note where the measure was best; the run saves that state."""
        if self.improves(self.measured(measures)):
            self.step = engine.step_number

    def forget(self) -> None:
        """The checkpoint is not there any more: the next evaluation is the best."""
        self.best = self.step = None

    def state_dict(self) -> dict[str, Any]:
        """The best value and its step."""
        return {"best": self.best, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.step = state["best"], state["step"]


class ReduceLROnPlateau(MeasureWatcher):
    """Multiply the learning rate by ``factor`` when a measure has not improved in ``patience`` evaluations.

    As `torch.optim.lr_scheduler.ReduceLROnPlateau`, with evaluations in the place of epochs: the rate falls at the
    evaluation after ``patience`` others without improvement. The task's schedule is multiplied by it. ``rate=plateau``
    of a task sets one up.
    """

    def __init__(
        self, measure: str = "loss", factor: float = 0.1, patience: int = 10, min_delta: float = 0.0,
        mode: str = "auto", cooldown: int = 0, end: float = 0.0,
    ) -> None:  # fmt: skip
        """``cooldown``: evaluations after a reduction that do not count. ``end``: the lowest factor on the rates."""
        super().__init__(measure, mode, min_delta)
        if not 0 < factor < 1:
            raise WrongUse(f"ReduceLROnPlateau(factor={factor}) reduces nothing. Use a factor between 0 and 1.")
        if patience < 0 or cooldown < 0:
            raise WrongUse(f"ReduceLROnPlateau(patience={patience}, cooldown={cooldown}): give 0 or more of each.")
        if not 0 <= end <= 1:
            raise WrongUse(f"ReduceLROnPlateau(end={end}) is no share of the learning rate. Use a number from 0 to 1.")
        self.factor, self.patience, self.cooldown, self.end = factor, patience, cooldown, end
        self.reduced, self.waited, self.cooling = 1.0, 0, 0

    def rate_factor(self) -> float:
        return self.reduced

    def on_evaluation(self, engine: Engine, measures: Mapping[str, float]) -> None:
        """Count what did not improve."""
        improved = self.improves(self.measured(measures))
        self.waited = 0 if improved or self.cooling else self.waited + 1
        self.cooling = max(0, self.cooling - 1)
        if self.waited > self.patience:
            self.reduced = max(self.end, self.reduced * self.factor)
            self.waited, self.cooling = 0, self.cooldown

    def state_dict(self) -> dict[str, Any]:
        """What has been seen, and how far the rate is down."""
        return {name: getattr(self, name) for name in ("best", "reduced", "waited", "cooling")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class EMA(Callback):
    """An exponential moving average of the trained weights: ``decay * average + (1 - decay) * weight`` a step.

    Each rank averages its own part. The whole is in ``final/ema.safetensors`` at the end of a run, in
    ``engine.whole_weights(callback)``, and exported by ``phalanx export RUN --weights ema``. Steps that were skipped do
    not count.
    """

    def __init__(self, decay: float = 0.999, evaluate: bool = False, buffers: bool = False) -> None:
        """``evaluate``: held-out data is evaluated with the average instead of the weights.

        ``buffers``: floating-point buffers are averaged as well, as batch-norm's running statistics. Else the average
        goes with the model's own.
        """
        if not 0 <= decay < 1:
            raise WrongUse(f"EMA(decay={decay}) averages nothing. Use a decay from 0 to below 1, such as 0.999.")
        self.decay, self.evaluate, self.buffers = decay, evaluate, buffers
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
        for name, value in self._live(engine):
            if name not in self.averages:
                self.averages[name] = value.detach().clone()

    @torch.no_grad()
    def on_step(self, engine: Engine, metrics: Metrics) -> None:
        """Average."""
        if not metrics.skipped:
            for name, value in self._live(engine):
                self.averages[name].lerp_(value.detach(), 1 - self.decay)

    def _live(self, engine: Engine) -> Iterator[tuple[str, Tensor]]:
        """What is averaged, as it is now."""
        yield from ((name, weight.shard) for name, weight in engine.spread.weights.items() if weight.trainable)
        if self.buffers:
            yield from ((n, b) for n, b in engine.spread.whole.replicated() if b.is_floating_point() and b.numel())

    def tensors(self) -> dict[str, Tensor]:
        """The average of this rank's part of each weight, and of buffers."""
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
