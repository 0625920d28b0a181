"""A witness: on every rank, holds what the rank has after each step against what one device had.

It looks at what is there anyway and asks nothing of other ranks, so it changes neither what travels nor when.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx.callbacks import Callback
from phalanx.data.loader import StepBatch
from phalanx.parallel.weights.weight import Weight
from phalanx.prove.ladder import Difference, Standard, off, size
from phalanx.prove.ranks.census import amiss, crossing, expected
from phalanx.prove.reference.evaluation import Measures, in_words, off_by
from phalanx.prove.reference.loop import as_moment, options
from phalanx.task import rates
from phalanx.train.engine import Engine
from phalanx.train.evaluate import evaluate
from phalanx.train.sites import agreed_weights
from phalanx.train.step import Metrics

FAR = (1, 4, 20, 100, 1000)
Held = tuple[str, str, Tensor | None, Callable[[Tensor], Tensor] | None]
"""Rung, name, value, and the function from the whole to it; None where every rank has the whole."""


@dataclass
class Testimony:
    """What a rank has seen."""

    rank: int
    coordinates: dict[str, int]
    differences: list[Difference] = field(default_factory=list)
    worst: tuple[float, str] = (0.0, "")
    """The largest error of any tensor, within the bar or not, and where it was."""
    errors: dict[tuple[int, str], float] = field(default_factory=dict)
    """By step and rung, the largest."""
    slots: list[list[int]] = field(default_factory=list)
    """By step, those of the global batch that this rank computed."""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """By step, the numbers that all ranks must have alike."""
    state: dict[Any, int] = field(default_factory=dict)
    """At the end, by what it is: checksums of all that is held. Whoever holds the same must hold the same bits."""
    imported: list[str] = field(default_factory=list)
    """The files of the user's modules that this rank has imported."""
    site: int = 0
    """Where sites train by themselves; ranks of one have the same numbers."""


class Witness(Callback):
    """Watches one engine, and the one that goes on where that was interrupted."""

    def __init__(self, engine: Engine, standard: Standard, dtypes: str) -> None:
        self.standard, self.dtypes = standard, dtypes
        site = engine.mesh.index("dp") if engine.sites is not None else 0
        self.told = Testimony(engine.environment.rank, dict(engine.mesh.coordinates), site=site)
        self.step = 0
        self.astray = False
        """A step came that is not the next: what follows cannot be compared."""
        self.watch(engine)
        self._initial()
        self.went_on()

    def watch(self, engine: Engine) -> None:
        """Look at this engine from now on."""
        self.engine = engine
        self.holding, self.weights = engine.spread.holding, engine.spread.weights
        self._own = [(bucket, weight) for bucket in engine.spread.buckets for weight in bucket.weights]
        engine.callbacks.add(self)
        engine.turns.refuses_apart = False
        engine.optimizer.register_step_pre_hook(self._given)
        self._data().read.clear()

    def went_on(self) -> None:
        """What was sent until now belongs to no step that is to come."""
        traffic = self.engine.traffic
        self._before = traffic.calls.copy(), traffic.sent.copy()

    def _data(self) -> Any:
        return self.engine.loader.reader.data

    def _part(self, weight: Weight, whole: Tensor) -> Tensor:
        """This rank's rows of a whole."""
        return weight.own_rows(self.holding.part(weight.name, whole)).view(weight.shard.shape)

    def _note(self, rung: str, name: str, error: float, found: Any = "", expected: Any = "") -> None:
        if error > self.told.worst[0] and rung != "settings":
            self.told.worst = error, f"{rung}: {name}, step {self.step}"
        if math.isfinite(error):
            key = self.step, rung
            self.told.errors[key] = max(error, self.told.errors.get(key, 0.0))
        if error > self.standard.limit(self.step, rung):
            self.differ(self.step, rung, name, error, str(found), str(expected))

    def differ(self, step: int, rung: str, name: str, error: float, found: str, expected: str) -> None:
        self.told.differences.append(Difference(step, rung, name, error, self.told.rank, found, expected))

    def _same(self, rung: str, name: str, found: Any, expected: Any) -> None:
        if found != expected:
            self._note(rung, name, math.inf, found, expected)

    def _number(self, rung: str, name: str, found: float, expected: float) -> None:
        if math.isfinite(found) and math.isfinite(expected):
            error = abs(found - expected) / max(abs(expected), 1e-300)
        else:
            error = 0.0 if math.isfinite(found) == math.isfinite(expected) else math.inf
        self._note(rung, name, error, f"{found:.17g}", f"{expected:.17g}")

    def _initial(self) -> None:
        names = set()
        for name, whole in self.engine.spread.whole.state():  # not by its parts: they may lie wrong on both sides
            names.add(name)
            want = self.standard.initial.get(name)
            if want is not None:
                self._note("initial weights", name, off(whole, want, size(want), 0))
        self._same("initial weights", "names", sorted(names), sorted(self.standard.saved))
        for name, buffer in self.engine.spread.model.named_buffers():
            if self.holding.here(name) and buffer.is_floating_point():
                want = self.standard.initial[name]
                self._note("initial weights", name, off(buffer, want, size(want), 0))

    def _given(self, *given: Any) -> None:
        """What the optimizer is about to update with."""
        if self.standard.steps[self.step].skipped:
            return
        for _, weight in self._own:
            if weight.trainable:
                self._tensor("given gradients", weight.name, weight.shard.grad, partial(self._part, weight))

    def on_gradients(self, engine: Engine, divisor: float, without: set[str]) -> None:
        """Before clipping: this rank's rows of the summed gradients."""
        if self.standard.steps[self.step].skipped:
            return
        for bucket, weight in self._own:
            if weight.trainable:
                found = None if weight.name in without else bucket.gradient_own(weight) / divisor
                self._tensor("gradients", weight.name, found, partial(self._part, weight))

    def _tensor(self, rung: str, name: str, found: Tensor | None, part: Any = None) -> None:
        self._note(rung, name, self.standard.error(self.step, rung, name, found, part))

    def before(self, batch: StepBatch) -> None:
        """A step begins."""
        if batch.step != self.step:
            done = [*range(self.step), batch.step]
            said = f"steps {', '.join(map(str, done[:-1]))} are done, and the next is {batch.step}"
            self.differ(self.step - 1, "ledger", "steps", math.inf, said, "resumed")
            self.astray = True
            return
        self._samples(batch)
        if batch.step == len(self.standard.steps) - 1 and self.standard.evaluation is not None:
            self._evaluation(self.standard.evaluation)

    def _evaluation(self, want: Measures) -> None:
        """What held-out data gives before the last step; the rows of all samples are on one rank."""
        assert self.engine.held_out is not None
        self.standard.decisions.resting = True
        with agreed_weights(self.engine):
            found = evaluate(self.engine, self.engine.held_out)
        self.standard.decisions.resting = False
        here = dict(Measures(found.sums, found.gathered or {}, found.numbers).items())
        self.step -= 1
        for name, right in want.items():
            elsewhere = name in want.rows and found.gathered is None
            jumps = self.standard.limits is not None and name in want.summaries
            if name in self.standard.unsteady or elsewhere or jumps:
                continue
            if name in here:
                self._note("evaluation", name, off_by(here[name], right), *in_words(here[name], right))
            else:
                self._note("evaluation", name, math.inf, "missing", "measured")
        self.step += 1
        self.went_on()

    def after(self, batch: StepBatch, metrics: Metrics) -> None:
        """A step is over."""
        want = self.standard.steps[self.step]
        self._same("settings", "samples of the step", metrics.slots, len(want.ids))
        self._same("settings", "dtypes", self.engine.dtypes.table(), self.dtypes)
        self._options(want.options)
        if not want.skipped:
            self._number("loss", "count", metrics.count, want.count)
            self._number("loss", "total", metrics.loss * metrics.count, want.total)
            self._number("gradient norm", "norm", metrics.grad_norm, want.norm)
            self._number("clip factor", "factor", metrics.clip_factor, want.clip_factor)
        self._same("skipping", "skipped", metrics.skipped, want.skipped)
        for rung, name, value, part in self.held(self.step):
            self._tensor(rung, name, value, part)
        agreed = asdict(metrics)
        self.told.metrics.append({n: v for n, v in agreed.items() if n not in ("seconds", "sent", "communication")})
        traffic = self.engine.traffic
        calls, sent = traffic.calls - self._before[0], traffic.sent - self._before[1]
        if not want.skipped:
            for axis, kind, words in amiss(calls, sent, expected(self.engine, len(batch.micro_batches), want.called)):
                self._note("communication", f"{kind} over {axis}", math.inf, words)
        for axis, kind, words in crossing(self.engine, calls, sent):
            self._note("communication", f"{kind} over {axis}", math.inf, words)
        self.went_on()
        self.step += 1

    def held(self, step: int) -> Iterator[Held]:
        """All that this rank holds of what one device has after a step."""
        self.engine.spread.settle()
        for bucket, weight in self._own:
            part = partial(self._part, weight)
            kept = self.engine.optimizer.state.get(weight.optimized, {})
            here = weight.trainable and weight.state_here
            for name in self.standard.steps[step].moments[weight.name] if here else ():
                value = as_moment(kept.get(name))
                yield "moments", f"{weight.name} {name}", value, self._moment_part(weight, value)
            yield "weights", weight.name, weight.shard.data, part
            if bucket.is_whole and weight.shard is not weight.full:
                yield "weights in use", weight.name, weight.full.data, partial(self.holding.part, weight.name)
        for name, buffer in self.engine.spread.model.named_buffers():
            if self.holding.here(name):
                yield "buffers", name, buffer, None

    def _moment_part(self, weight: Weight, value: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        """From what one device keeps of a weight to what this rank keeps of it."""
        if value is not None and value.shape != weight.optimized.shape:
            return None
        if weight.optimized is weight.shard:
            return partial(self._part, weight)
        return lambda whole: whole.view(weight.optimized.shape)

    def _options(self, of_one: dict[str, dict[str, Any]]) -> None:
        for name, found in options(self.engine.optimizer).items():
            for option, value in found.items():
                want = of_one.get(name, {}).get(option)
                if isinstance(value, float) and isinstance(want, float) and math.isclose(value, want, rel_tol=1e-12):
                    continue
                if name in of_one:
                    self._same("settings", f"{option} of {name}", value, want)

    def _samples(self, batch: StepBatch) -> None:
        """Which samples this rank had in its slots, and what it read of them."""
        want = self.standard.steps[self.step]
        self.told.slots.append([int(s) for micro in batch.micro_batches if micro.real for s in micro.slots])
        self._same("samples", "hash of the global batch", batch.samples, want.samples)
        read = list(self._data().read)
        self._data().read.clear()
        for number, micro in enumerate(batch.micro_batches):
            own, read = read[: len(micro.slots)], read[len(micro.slots) :]
            found = [index for index, _ in own]
            slots = [int(slot) for slot in micro.slots]
            expected = [want.read[slot] if slot < len(want.read) else (-1, "") for slot in slots]
            where = f"micro-batch {number}"
            if found != [index for index, _ in expected]:
                self._note("samples", f"ids of {where}", math.inf, found, [index for index, _ in expected])
            elif own != expected:
                changed = [index for (index, a), (_, b) in zip(own, expected, strict=True) if a != b]
                self._note("samples", f"contents of {where}", math.inf, f"other contents of samples {changed}")

    def finish(self) -> Testimony:
        """After the last step."""
        self.step -= 1
        self._schedule()
        self._ledger()
        for _, weight in self._own:
            cut = self.holding.cut(weight.name)
            part = cut.spans[self.holding.index(weight.name)] if cut else None
            place = weight.name, part, weight.first, weight.last
            self.told.state["weights", *place] = checksum(weight.shard.data)
            whole = weight.optimized is not weight.shard
            for name, held in self.engine.optimizer.state.get(weight.optimized, {}).items():
                if (moment := as_moment(held)) is not None:
                    where = (None, 0, 0) if whole else place[1:]
                    self.told.state["moments", f"{weight.name} {name}", self.told.site, *where] = checksum(moment)
        for name, buffer in self.engine.spread.model.named_buffers():
            if self.holding.here(name):
                self.told.state["buffers", name, None, 0, 0] = checksum(buffer)
        return self.told

    def _ledger(self) -> None:
        """What a run says of itself at its end: every step, every sample, every term once."""
        done = self.standard.steps
        if not self.astray:
            self._same("ledger", "steps done", self.engine.step_number, len(done))
            self._same("ledger", "samples trained on", self.engine.samples, sum(len(step.ids) for step in done))
            terms = sum(step.terms for step in done if math.isfinite(step.terms))
            if not math.isclose(self.engine.terms, terms, rel_tol=1e-9):
                self._same("ledger", "terms trained on", self.engine.terms, terms)

    def _schedule(self) -> None:
        """The learning rate of steps that a trial does not come to. Asked in order, as training does."""
        schedule = rates(self.engine.task)
        for step in FAR:
            self.engine.set_learning_rate(step)
            for group in self.engine.optimizer.param_groups:
                want = group["initial_lr"] * group.get("rate", schedule)(step)
                if not math.isclose(group["lr"], want, rel_tol=1e-12):
                    self._same("settings", f"lr in step {step}", group["lr"], want)


def checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
