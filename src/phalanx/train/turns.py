"""Turns: steps that train one part of a model after another, such as a discriminator and a generator.

Which part a step trains is a pure function of its number, so a step is whole in itself: one batch, one loss, one norm,
one decision to skip, one update. Weights whose turn it is not get no gradient, as if they were frozen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from zlib import crc32

import torch
from torch import nn

from phalanx.callbacks import Callback, Freeze
from phalanx.errors import WrongUse
from phalanx.task import Task
from phalanx.train.thawed import begins_frozen


class Turns:
    """Which weights a step trains."""

    def __init__(self, task: Task, trainable: Mapping[str, bool], callbacks: Iterable[Callback] = ()) -> None:
        """``trainable``: every weight of the model, and whether it is trained at all.

        ``callbacks``: those of the task, which may leave weights out of some steps.
        """
        self.task = task
        self._choosing = [each for each in callbacks if type(each).trains is not Callback.trains]
        self._taken = "", -1
        self.fingerprint = 0
        """Says which weights callbacks let this step train: the same on all ranks, or they go apart."""
        self.refuses_apart = True
        """Then ranks are refused at once; a proof goes on, and finds which weights."""
        self.names = names = [name for name, trained in trainable.items() if trained]
        kind = type(task).__name__
        for turn in dict.fromkeys(task.turns):
            if not any(task.trains(turn, name) for name in names):
                raise WrongUse(
                    f"the turn {turn!r} of {kind} trains no weight of its model: none is called {turn}.*. Name a "
                    "module, or give the task a trains(turn, weight)."
                )
        idle = [name for name in names if task.turns and not any(task.trains(turn, name) for turn in task.turns)]
        if idle:
            raise WrongUse(
                f"{idle[0]} and {len(idle) - 1} other weights of {kind} have no turn, and would never be trained. Add "
                "one to turns, or freeze them with requires_grad_(False)."
            )

        ends = {end for each in self._choosing if isinstance(each, Freeze) for end in (each.since, each.until or 0)}
        for step in sorted({0, *ends}) if self._choosing else ():
            if step < task.steps:
                self._check_some(step)

    @property
    def leaves_out(self) -> str:
        """What may leave weights out of steps that come after some which trained them; nothing, mostly."""
        stopping = sorted({type(each).__name__ for each in self._choosing if not _only_begins(each)})
        if len(set(self.task.turns)) > 1:
            return "its turns leave"
        return f"{', '.join(stopping)} may leave" if stopping else ""

    def _trains(self, step: int, name: str) -> bool:
        """Whether a step trains a weight."""
        return self.task.trains(self.task.turn(step), name) and all(each.trains(step, name) for each in self._choosing)

    def _check_some(self, step: int) -> None:
        """Refuse a step that would train nothing."""
        if self.names and not any(self._trains(step, name) for name in self.names):
            kinds = ", ".join(sorted({type(each).__name__ for each in self._choosing}))
            raise WrongUse(
                f"step {step + 1} would train no weight of {type(self.task).__name__}: {kinds} leaves out all of them. "
                "Let some be trained in every step."
            )

    @property
    def begin_frozen(self) -> bool:
        """Whether there are weights that the first steps alone do not train."""
        return any(map(begins_frozen, self._choosing))

    def completed(self, shards: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """A rank's shards, and for a turn of which it has none, as a stage of a pipeline may, one that stands in."""
        found = list(shards)
        for turn in dict.fromkeys(self.task.turns):
            own = [name for name in self.names if self.task.trains(turn, name)]
            if not {getattr(shard, "logical_name", "") for shard in shards}.intersection(own):
                stand_in = nn.Parameter(torch.zeros(1, 1))
                stand_in.logical_name = own[0]  # type: ignore[attr-defined]
                found.append(stand_in)
        return found

    def take(self, step: int, weights: Mapping[str, nn.Parameter]) -> str:
        """Whose turn it is in a step; from here on its weights alone, of those that are trained, get gradients."""
        turn = self.task.turn(step)
        now = turn, step if self._choosing else -1
        if now != self._taken:
            self._taken = now
            trained = [name for name in self.names if self._trains(step, name)]
            if self._choosing:
                self._check_some(step)
                self.fingerprint = crc32("\n".join(trained).encode())
            for name, weight in weights.items():
                weight.requires_grad_(name in trained)
        return turn


def _only_begins(callback: Callback) -> bool:
    """Whether it leaves weights out of a run's first steps alone, or of all: none that was trained before."""
    return isinstance(callback, Freeze) and type(callback).trains is Freeze.trains and callback.since == 0
