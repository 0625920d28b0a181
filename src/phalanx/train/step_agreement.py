"""What all ranks hold alike after a step's one small sum: losses, counts, the norm, and what ranks tell each other."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phalanx.comm import Comm
from phalanx.errors import WrongUse
from phalanx.kernels.transfer import sent
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.exact import fold
from phalanx.parallel.communication.peers import Expected
from phalanx.train.signals import NAMES, Signals
from phalanx.train.totals import by_leaf

if TYPE_CHECKING:
    from phalanx.train.engine import Engine

AGREED = 5 + len(NAMES)
"""Numbers in a step's one small sum: total, count, norm, missing weights, which are trained, signals."""


@dataclass(frozen=True)
class Agreed:
    """What all ranks hold alike after a step's one small sum."""

    total: float
    count: float
    named: list[float]
    """Likewise of losses that have names, then of what is logged."""
    norm: float
    norms: list[float]
    """Of groups of weights that have limits of their own."""
    missing: float
    """How many weights some ranks have no gradient of."""
    signals: Signals
    alike: bool
    """Whether all ranks train the same weights."""

    def leaving_out(self, engine: Engine, without: set[str]) -> Agreed:
        """The norms without these weights, of which nobody has a gradient: what was owed of them may have been sent."""
        method = Comm.parse(engine.layout.comm)
        if method is None or not method.owes:
            return self
        gradients = engine.spread.gradients
        for weight, own in gradients.each():
            if weight.name in without:
                own.zero_()
        squares = [gradients.norm_squared()[None], gradients.norms_squared(engine.clipping.groups)]
        norm, *norms = _roots(summed_over_ranks(engine, torch.cat(squares)).tolist())
        return replace(self, norm=norm, norms=norms)


class StepSum:
    """A step's one small sum, over all ranks that make it together.

    Where links may be slow ranks say before a step that they are ready for it, as many numbers as in the last one.
    """

    def __init__(self, world: Communicator, slow: bool) -> None:
        self.world, self._expects = world, slow and world.expects
        self._expected: Expected | None = None
        self._rows: Tensor | None = None

    def expect(self) -> None:
        """A step begins."""
        left = self._expected
        if left is not None and left.rows is not self._rows:  # there was more to agree on, or less
            self.world.all_reduce(torch.zeros_like(left.rows[0]), left).wait()
            self._expected = None
        if self._rows is not None and self._expected is None:
            self._expected = self.world.expect(self._rows)

    def __call__(self, numbers: Tensor) -> None:
        """Sum in place."""
        expected = self._expected
        if expected is not None and expected.rows.shape[1:] == numbers.shape:
            self._expected = None
            self.world.all_reduce(numbers, expected).wait()
        else:
            self.world.all_reduce(numbers).wait()

    def settle(self, numbers: Tensor) -> None:
        """The next step's sum will be of as many."""
        if self._expects and (self._rows is None or self._rows.shape[1:] != numbers.shape):
            self._rows = numbers.new_empty(self.world.size, *numbers.shape)


def agree(engine: Engine, step: int, sums: Tensor) -> Agreed:
    """Have all ranks agree on a step. ``sums``: this rank's losses, see `Totals.table`."""
    found = (_exactly if engine.layout.exact else _summed)(engine, sums, engine.turns.fingerprint)
    if not found.alike and engine.turns.refuses_apart:
        raise WrongUse(
            f"ranks train other weights in step {step + 1}: trains(step, weight) of a callback of "
            f"{type(engine.task).__name__} must follow from the two alone, on every rank alike."
        )
    return found


def _summed(engine: Engine, sums: Tensor, trained: int) -> Agreed:
    """``trained``: says which weights this rank trains."""
    gradients, own = engine.spread.gradients, sums.sum(0)
    apart = gradients.norms_squared(engine.clipping.groups)
    timed = sent(torch.tensor(engine.auto_comm.told, dtype=own.dtype), engine.device)
    numbers = torch.cat([own[:2], gradients.norm_squared()[None], _told(engine, trained), own[2:], apart, timed])
    summed_over_ranks(engine, numbers)
    engine.step_sum.settle(numbers)
    total, count, squared, missing, trained_by_all, *rest = engine.auto_comm.agreed(numbers.tolist())
    alike = trained_by_all == trained * engine.spread.mesh.world.size
    signals, named = Signals.unpacked(rest[: len(NAMES)]), rest[len(NAMES) : len(rest) - len(apart)]
    norm, *norms = _roots([squared, *rest[len(rest) - len(apart) :]])
    return Agreed(total, count, named, norm, norms, missing, signals, alike)


def _roots(squares: list[float]) -> list[float]:
    return [math.sqrt(each) if each >= 0 else math.nan for each in squares]


def _exactly(engine: Engine, sums: Tensor, trained: int) -> Agreed:
    """The same to the same bits at any number of ranks: losses by the tree, the norm as a sum of whole numbers."""
    gradients = engine.spread.gradients
    few = torch.cat([gradients.largest()[None], _told(engine, trained)])
    every = engine.mesh.world.gathered(torch.cat([few, sums.view(-1)]))
    largest, missing, alike = float(every[:, 0].amax()), float(every[:, 1].sum()), bool(every[:, 2].eq(trained).all())
    signals = Signals.unpacked(every[:, 3 : 3 + len(NAMES)].sum(0).tolist())
    total, count, *named = fold(by_leaf(engine, every[:, 3 + len(NAMES) :].reshape(-1, sums.shape[1]))).tolist()
    wanted = [None, *engine.clipping.groups]
    norm, *norms = (gradients.exact_norm(largest, each) if math.isfinite(largest) else math.inf for each in wanted)
    return Agreed(total, count, named, norm, norms, missing, signals, alike)


def _told(engine: Engine, trained: int) -> Tensor:
    """What this rank has to tell: how many weights it has no gradient of, which it trains, its signals."""
    numbers = [len(engine.spread.untouched()), trained, *engine.signals.packed()]
    return sent(torch.tensor(numbers, dtype=torch.float64), engine.device)


def summed_over_ranks(engine: Engine, numbers: Tensor) -> Tensor:
    """A few numbers of a step, summed over all ranks that make it together, in place."""
    engine.step_sum(numbers)
    return numbers


def nobody_touched(engine: Engine) -> set[str]:
    """Weights that got a gradient on no rank: the optimizer must leave them alone, as it would on one device."""
    own = set(engine.spread.untouched())
    names = [name for name, trainable in engine.spread.trainable.items() if trainable]
    held = engine.spread.weights
    touched = torch.tensor([float(n in held and n not in own) for n in names], dtype=torch.float64)
    touched = touched.to(engine.device)
    summed_over_ranks(engine, touched)
    return {name for name, hits in zip(names, touched.tolist(), strict=True) if not hits}
