"""Sites that train by themselves: after which steps they agree on weights, and all ranks on what is to be done.

Between two such steps no message leaves a site. What concerns all ranks, as a request to stop, a save or a callback
that ends the run, is told and heard at a boundary, where all fragments have been agreed on and none travels.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx.errors import WrongUse
from phalanx.layout import Layout
from phalanx.local_updates import LocalUpdates
from phalanx.parallel.communication.pending import Pending
from phalanx.parallel.weights.outer import OuterWeights
from phalanx.precision import DTYPES
from phalanx.task import Task
from phalanx.train.signals import NAMES, Signals
from phalanx.words import many

if TYPE_CHECKING:
    from phalanx.train.engine import Engine
    from phalanx.train.step import Metrics

NUMBERS = 6
"""Of a round, before the signals: total and count of the loss, steps left out, bad ones, terms trained on, and whether
the last step that could be judged was bad, which is told until there is another."""
BAD, TERMS, ENDED_BADLY = 3, 4, 5


@dataclass(frozen=True)
class SitesRound:
    """What sites did by themselves, and agreed on, the same on every rank."""

    step: int
    """The last of it."""
    loss: float
    """Per term, over all samples of all its steps."""
    count: float
    skipped: int
    """Steps that a site has left out, added up over sites."""
    bad: str
    """What was, if anything."""
    ended_badly: int
    """Sites whose last step that could be judged was bad."""
    signals: Signals = field(default_factory=Signals)


class Sites:
    """This rank's part in the agreement of all sites."""

    def __init__(self, engine: Engine, local: LocalUpdates) -> None:
        _check(engine, local)
        self.engine, self.local = engine, local
        self.outer = engine.spread.outer = OuterWeights.of(engine.spread, local)
        self.outer.begin(*local.outer)
        self._speaks = engine.spread.mesh.world.rank == 0
        """Each site counts once."""
        self.outer.untold = [0.0] * NUMBERS
        self._told: tuple[Pending, Tensor] | None = None
        """What is on its way to all ranks."""
        self._fresh = set[int]()
        """Fragments that have been agreed on since the last step."""
        self.just_agreed = range(1)
        """After a boundary: the steps since the last one."""
        self._buffers = {
            name: (tensor, tensor.detach().clone())
            for name, tensor in engine.spread.whole.replicated()
            if tensor.is_floating_point() and engine.spread.holding.here(name)
        }
        """Each, and as sites last had it alike."""

    def after_step(self, metrics: Metrics) -> SitesRound | None:
        """Have fragments leave and arrive; what all sites did since the last boundary, where this step is one."""
        traffic = self.engine.traffic
        before = traffic.sent.copy()
        found = self._after_step(metrics)
        metrics.sent = dict(Counter(metrics.sent) + Counter(traffic.sent_since(before)))
        return found

    def _after_step(self, metrics: Metrics) -> SitesRound | None:
        engine, local, step = self.engine, self.local, self.engine.step_number
        self._note(metrics)
        self.just_agreed = range(0)
        if step == engine.task.steps:
            return self.finish()
        with engine.traffic.recorder.during("outer step"):
            if (arriving := local.arriving(step)) is not None:
                self.outer.arrive(arriving)
                self._fresh.add(arriving)
                engine.spread.updated()
            elif local.overlap and local.arriving(step + local.overlap // 2) is not None:
                self.outer.advance()
            if local.overlap and (leaving := local.leaving(step)) is not None:
                self.outer.leave(leaving)
                if local.is_boundary(step + local.overlap):
                    self._tell()
            if not local.is_boundary(step):
                return None
            heard = self._hear()
            found = self._agreed(heard)
        return self.finish(heard) if found.signals.finish else found

    def finish(self, *heard: list[float]) -> SitesRound:
        """The run ends after this step: all is agreed on, and nothing else stays. All ranks must call it.

        ``heard``: what all have told of the steps up to it already.
        """
        with self.engine.traffic.recorder.during("outer step"):
            every, travelling = set(range(len(self.outer.fragments))), self.outer.travelling
            carried = self._fresh | travelling if self.local.overlap else set()
            for number in [*sorted(travelling), *sorted(every - self._fresh - travelling)]:
                self.outer.arrive(number)
            for number in sorted(carried):  # what was trained while they travelled is not to be lost
                self.outer.average(number)
            self.outer.rest()
            self.engine.spread.updated()
            self._fresh = every
            late = [] if self._told is None else [self._hear()]
            return self._agreed(*heard, *late, self._hear())

    def pass_over(self) -> SitesRound | None:
        """A step is left out, for bad ones of which all have heard. After the last step all is agreed on."""
        self.outer.untold[BAD] = 0.0
        return self.finish() if self.engine.step_number == self.engine.task.steps else None

    def _note(self, metrics: Metrics) -> None:
        """A step of this site."""
        counts = not metrics.skipped and math.isfinite(metrics.loss)
        total, count = (metrics.loss * metrics.count, metrics.count) if counts else (0.0, 0.0)
        new = total, count, float(metrics.skipped), float(bool(metrics.bad)), metrics.count
        *before, badly = self.outer.untold
        judged = metrics.bad or not metrics.skipped
        added = [was + more for was, more in zip(before, new, strict=True)]
        self.outer.untold = [*added, float(bool(metrics.bad)) if judged else badly]
        self._fresh = set()

    def _tell(self) -> None:
        """Begin to tell all ranks what this site did, what this rank has to say, and which buffers it has changed."""
        own = [number * self._speaks for number in self.outer.untold]
        said = [*own, *self.engine.signals.packed(), *self._changed()]
        numbers = torch.tensor(said, dtype=torch.float64).to(self.engine.device)
        self._told = self.engine.mesh.world.all_reduce(numbers), numbers
        self.outer.untold = [*[0.0] * ENDED_BADLY, self.outer.untold[ENDED_BADLY]]

    def _hear(self) -> list[float]:
        """What everybody told, or tells now."""
        if self._told is None:
            self._tell()
        assert self._told is not None
        (pending, numbers), self._told = self._told, None
        pending.wait()
        found: list[float] = numbers.tolist()
        self.engine.terms += found[TERMS]
        return found

    def _agreed(self, *heard: list[float]) -> SitesRound:
        """A boundary: all ranks know the same from here on, of what they have ``heard`` since the last one."""
        step = self.engine.step_number
        total, count, skipped, bad, _, _, *rest = map(sum, zip(*heard, strict=True))
        self._average([bool(number) for number in rest[len(NAMES) :]])
        self.just_agreed = self.local.since(step)
        words = f"bad numbers in {many(round(bad), 'step')} of sites since step {self.just_agreed[0]}" if bad else ""
        self.engine.good = step - 1 if count and not bad else self.engine.good  # a site may have had no terms
        return SitesRound(
            step=step - 1,
            loss=total / count if count else math.nan,
            count=count,
            skipped=round(skipped),
            bad=words,
            ended_badly=math.ceil(heard[-1][ENDED_BADLY]),
            signals=Signals.unpacked(rest[: len(NAMES)]),
        )

    def _changed(self) -> list[float]:
        """Of each buffer, whether this site's is not what it was when sites had it alike."""
        names = [name for name, _ in self.engine.spread.whole.replicated()]
        return [float(name in self._buffers and not torch.equal(*self._buffers[name])) for name in names]

    @torch.no_grad()
    def _average(self, changed: list[bool]) -> None:
        """Have sites hold buffers alike: their mean, where any site has changed one."""
        names = [name for name, _ in self.engine.spread.whole.replicated()]
        found = [self._buffers[n] for n, other in zip(names, changed, strict=True) if other and n in self._buffers]
        if not found:
            return
        flat = torch.cat([now.reshape(-1).double() for now, _ in found])
        self.outer.sites.all_reduce(flat).wait()
        flat /= self.outer.sites.size
        for (now, before), mean in zip(found, flat.split([now.numel() for now, _ in found]), strict=True):
            now.copy_(mean.view(now.shape))
            before.copy_(now)

    def as_the_first(self, state: dict[str, Any]) -> dict[str, Any]:
        """What callbacks have on the first rank: they were told of their own site alone. All ranks must call it."""
        words = [json.dumps(state)] if self.engine.environment.rank == 0 else []
        found: dict[str, Any] = json.loads(self.engine.mesh.world.broadcast_words(words, 0)[0])
        return found

    def settle(self) -> None:
        """A saved state has been taken up."""
        self.outer.discard()
        if self._told is not None:
            self._told[0].wait()
        self.outer.untold = [*self.outer.untold, *[0.0] * NUMBERS][:NUMBERS]
        self._told, self.just_agreed = None, self.local.since(self.engine.step_number)
        every = range(len(self.outer.fragments))  # of which the last was agreed on, or at a run's end all
        self._fresh = set(every[-1:] if self.local.is_boundary(self.engine.step_number) else every)
        for now, before in self._buffers.values():
            before.copy_(now)


@contextmanager
def agreed_weights(engine: Engine) -> Iterator[None]:
    """While this lasts, all sites compute with what they have agreed on."""
    sites = engine.sites
    if sites is None or (sites.just_agreed and not sites.local.apart):
        yield
        return
    engine.callbacks.await_copy(engine)
    try:
        with sites.outer.in_place():
            engine.spread.updated()
            yield
    except BaseException:
        engine.spread.stale = True
        raise
    engine.spread.updated()


def check_scales(task: Task, layout: Layout) -> None:
    """Refuse sites that would have scales of their own."""
    if layout.local is not None and (task.precision == "fp16" or DTYPES[task.precision].fp8):
        raise WrongUse(
            f"comm={layout.comm} has sites train by themselves, and {task.precision} keeps scales that would not be "
            "the same in all of them. Use precision=bf16."
        )


def _check(engine: Engine, local: LocalUpdates) -> None:
    """Refuse what every step of all ranks would have to agree on."""
    task = engine.task
    check_scales(task, engine.layout)
    if keeping := sorted(engine.callbacks.tensors()):
        raise WrongUse(
            f"{', '.join(keeping)} keeps tensors of weights after every step, and with comm={engine.layout.comm} each "
            "site has weights of its own then. Leave it out: what sites agree on is a mean already."
        )
    if local.outer[1] and engine.turns.leaves_out:
        raise WrongUse(
            f"comm={engine.layout.comm} carries on what weights last changed, also of those that later steps of "
            f"{type(task).__name__} leave out. Use momentum=0, or comm=local:{local.every}."
        )
