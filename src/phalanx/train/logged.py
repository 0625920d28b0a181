"""What a task and its model log in a step: added up by name and micro-batch, and over ranks with the step's one sum.

A rank may log under any name in any step. Those that not all ranks know yet are told to all after the step's sum, and
summed once more; from then on they travel with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx.data.loader import MicroBatch
from phalanx.errors import WrongUse
from phalanx.loss import Loss
from phalanx.metrics import Number, Taker, logged_by
from phalanx.parallel.communication.exact import fold
from phalanx.parallel.torch_private import compiler_is_loaded
from phalanx.train.totals import as_number, by_leaf

if TYPE_CHECKING:
    from phalanx.train.engine import Engine

MOST = 256
"""So many names a run may have."""


class Logged:
    """This rank's sums in a step, and the names that all ranks know."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.names: list[str] = []
        self._columns: dict[str, Tensor] = {}
        """By name, ``[micro-batches, 2]``: the sum of what was logged, each times its weight, and of the weights."""
        self._micro_batches: Sequence[MicroBatch] = ()
        self.loss = torch.zeros(0, 2)
        """Total and count of this rank's loss, by micro-batch of the step that was last begun."""

    def start(self, micro_batches: Sequence[MicroBatch], loss: Tensor) -> None:
        """Begin a step, whose losses are added up in ``loss``."""
        self._micro_batches, self.loss = micro_batches, loss
        self._columns.clear()

    def kept(self) -> Mapping[str, Any]:
        """What a step has left here, whose graph will be replayed."""
        return {"_micro_batches": self._micro_batches, "loss": self.loss, "_columns": dict(self._columns)}

    def put_back(self, kept: Mapping[str, Any]) -> None:
        """It was."""
        vars(self).update(kept, _columns=dict(kept["_columns"]))

    def taking(self) -> AbstractContextManager[None]:
        """While a micro-batch's forward runs: what is logged is added. Not in backward, which may compute it again."""
        return logged_by(self._take_uncompiled)

    @cached_property
    def _take_uncompiled(self) -> Taker:
        return torch.compiler.disable(self._take) if compiler_is_loaded() else self._take

    @torch.no_grad()
    def _take(self, name: str, value: Number | Loss, count: Number | None) -> None:
        moment, pipeline = self.engine.spread.moment, self.engine.spread.pipeline
        if not moment.real or moment.recomputing or (pipeline is not None and not pipeline.real):
            return
        row = next(i for i, micro in enumerate(self._micro_batches) if micro.slots is moment.slots)
        column = self._columns[name] = self._column(name)
        counts = value.count if isinstance(value, Loss) else len(moment.slots) if count is None else count
        weight = as_number(counts, column)
        total = as_number(value.total, column) if isinstance(value, Loss) else as_number(value, column) * weight
        if isinstance(counts, Tensor) or not counts:
            total = torch.where(weight > 0, total, 0.0)  # a mean of nothing may be nan
        column[row] += torch.stack([total, weight])

    @property
    def unknown(self) -> list[str]:
        """Names of this step that not all ranks know."""
        return [name for name in self._columns if name not in self.names]

    def table(self) -> list[Tensor]:
        """This rank's sums under each name that all ranks know."""
        return [self._column(name) for name in self.names]

    def _column(self, name: str) -> Tensor:
        found = self._columns.get(name)
        shape = len(self._micro_batches), 2
        return torch.zeros(shape, dtype=torch.float64, device=self.engine.device) if found is None else found

    def means(self, sums: Sequence[float], more: bool) -> dict[str, float]:
        """From everybody's sums, of what was logged in this step. ``more``: some rank has names that not all know."""
        found = list(sums) + (self._sums_of_new() if more else [])
        rows = zip(self.names, found[::2], found[1::2], strict=True)
        return {name: total / count for name, total, count in rows if count}

    def _sums_of_new(self) -> list[float]:
        """Have all ranks know all names. All ranks must call it."""
        engine = self.engine
        every = {name for names in engine.spread.mesh.world.all_gather_words(self.unknown) for name in names}
        new = sorted(every - set(self.names))
        if len(self.names) + len(new) > MOST:
            raise WrongUse(
                f"phalanx.log has had more than {MOST} names by step {engine.step_number + 1}, {new[-1]!r} among them. "
                "Use the same names in every step, without numbers of steps or samples in them."
            )
        self.names += new
        table = torch.cat([self._column(name) for name in new], 1)
        if engine.layout.exact:
            return fold(by_leaf(engine, engine.mesh.world.gathered(table).flatten(0, 1))).tolist()
        sums = table.sum(0)
        engine.spread.mesh.world.all_reduce(sums).wait()
        return sums.tolist()
