"""Randomness inside a model that does not depend on the layout.

While a micro-batch is computed, every draw is keyed by (seed, step, block, call, global sample, position in the
sample). Recomputing a block draws the same numbers again. DTensor's random operations repeat values across shards on a
CPU mesh, and a device generator's state depends on what ran before it, hence this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phalanx import counter
from phalanx.errors import WrongUse

Values = Callable[[Tensor, Sequence[int | Tensor]], Tensor]


@dataclass
class Moment:
    """What this rank computes just now."""

    step: int = 0
    slots: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    """The global batch's slots that this micro-batch holds."""
    real: bool = True
    """False for a stand-in, whose samples count for nothing."""
    recomputing: bool = False
    time: int = 0
    """The length of the sequences, where ranks hold parts of it."""
    here: Tensor | None = None
    """The positions that this rank of ``cp`` holds, while the model computes with them; None where it has all."""

    @property
    def length(self) -> int:
        """How many positions this rank of ``cp`` holds."""
        return self.time if self.here is None else len(self.here)

    @contextmanager
    def recompute(self, then: dict[str, Any]) -> Iterator[None]:
        """What was computed at another moment is computed again."""
        now = dict(vars(self))
        vars(self).update(then, recomputing=True)
        try:
            yield
        finally:
            vars(self).update(now)


@dataclass(frozen=True)
class Region:
    """Which part of a sample's activations is here: by coordinates, or None for all.

    Activations are ``[time, ..., features]``, attention scores ``[heads, time, time]``.
    """

    time: Tensor | None = None
    features: Tensor | None = None
    heads: Tensor | None = None

    def grid(self, inner: Sequence[int]) -> list[int | Tensor]:
        """The coordinates in the whole of a grid of this shape here."""
        if all(size == 1 for size in inner):
            return list(inner)  # one for a sample
        in_time = self.time is not None and [len(self.time)] == list(inner[1:2])
        scores = len(inner) == 3 and (self.heads is not None or in_time)
        dims = {0: self.heads, 1: self.time} if scores else {0: self.time, -1: self.features}
        found: list[int | Tensor] = list(inner)
        for dim, places in dims.items():
            if places is None or (len(inner) > 1 and inner[dim] == 1 != len(places)):
                continue  # whole here, or one for all of them
            if len(inner) < 2 or inner[dim] != len(places):
                raise WrongUse(
                    f"a draw of {tuple(inner)} for each sample, where {len(places)} of dim {dim} are on this rank: "
                    "its place in the whole cannot be told. Draw for [batch, time, width], or leave tp and cp out."
                )
            found[dim] = places
        return found


class Randomness:
    """Keyed draws. `scope` names the block that draws; draws are counted from its start."""

    def __init__(self, seed: int, moment: Moment, device: torch.device) -> None:
        self.seed, self.moment, self.device = seed, moment, device
        self.asked = False
        """Whether the model has called a random function."""
        self.answers: AbstractContextManager[Any] | None = None
        """Entered with the outermost scope: what leads torch's own random functions here."""
        self.region: Region | None = None
        """Where the residual stream is cut, until the scope's end; None where it is as ``cp`` left it."""
        self.inner: Region | None = None
        """Likewise, between the columns and the rows of tensor parallelism."""
        self._depth, self._call = 0, 0
        self.name = ""
        """Of the scope."""
        self._visits: dict[str, int] = {}
        self._keys: tuple[Tensor, Tensor] | None = None

    @contextmanager
    def scope(self, name: str, visit: int = 0) -> Iterator[None]:
        """Draws inside belong to ``name``, and to which of its visits in this micro-batch it is."""
        if not self._depth:
            self._visits.clear()
        outer = self.name, self._call, self._keys, self.region, self.inner
        self.name, self._call, self._keys = f"{name} {visit}" if visit else name, 0, None
        self.region = self.inner = None
        self._depth += 1
        try:
            with self.answers if self.answers and self._depth == 1 else nullcontext():
                yield
        finally:
            self._depth -= 1
            self.name, self._call, self._keys, self.region, self.inner = outer

    @property
    def calls(self) -> int:
        """Draws in this scope so far."""
        return self._call

    @calls.setter
    def calls(self, number: int) -> None:
        self._call = number

    @contextmanager
    def again(self, calls: int) -> Iterator[None]:
        """Draw once more what was drawn in this scope from a call on, for a whole sample."""
        outer = self._call, self.region, self.inner, self.moment.here
        self._call, self.region, self.inner, self.moment.here = calls, None, None, None
        try:
            yield
        finally:
            self._call, self.region, self.inner, self.moment.here = outer

    def scoped(self, name: str, forward: Callable[..., Any], keys_first: bool = False) -> Callable[..., Any]:
        """``forward(visit, ...)`` with its draws under ``name``. A compiled one needs its keys before it runs."""

        def run(visit: int, *args: Any, **kwargs: Any) -> Any:
            with self.scope(name, visit):
                if keys_first:
                    self.keys()
                return forward(*args, **kwargs)

        return run

    def counted(self, name: str, scoped: Callable[..., Any]) -> Callable[..., Any]:
        """What a model calls: each visit is told its number, which recomputing it will use again."""

        def run(*args: Any, **kwargs: Any) -> Any:
            visit = self._visits.get(name, 0)
            self._visits[name] = visit + 1
            return scoped(visit, *args, **kwargs)

        return run

    def keys(self) -> tuple[Tensor, Tensor]:
        """A key for each sample of the micro-batch, and one for what all samples share."""
        if self._keys is None:
            stream = counter.key(self.seed, "forward", self.moment.step, self.name)
            rows = torch.from_numpy(self.moment.slots).to(self.device) * counter.STRIDE + stream
            self._keys = counter.mix(rows), torch.tensor(stream, device=self.device)
        return self._keys

    def draw(self, shape: torch.Size, values: Values, like: Tensor | None = None) -> Tensor:
        """Random values of a shape: ``values(keys, inner)`` gives a grid of shape ``inner`` under each key.

        The batch is the first dim, or the second of three and more (``[time, batch, ...]``). In a draw ``like`` what
        the model computed it may be folded with others (``[batch * time, ...]``). What has no batch dim, and a draw
        like a weight, is the same on every rank.
        """
        self._call += 1
        self.asked = True
        if like is not None and like.is_meta:
            return torch.empty(shape, device="meta")  # another stage draws the values; here they only count
        rows, shared = self.keys()
        batch, call = rows.shape[0], counter.call_offset(self._call)
        folded = like is not None and bool(shape) and shape[0] % batch == 0
        if isinstance(like, nn.Parameter) or not shape or (len(shape) == 1 and shape[0] == 1):
            return values(counter.mix(shared + call), shape)
        if shape[0] == batch:
            return values(counter.mix(rows + call), self._grid(shape[1:])).view(shape)
        if len(shape) > 1 and shape[1] == batch and (len(shape) > 2 or not folded):
            return values(counter.mix(rows + call), self._grid([shape[0], *shape[2:]])).transpose(0, 1)
        if folded:
            return values(counter.mix(rows + call), self._grid([shape[0] // batch, *shape[1:]])).view(shape)
        return values(counter.mix(shared + call), shape)

    def _grid(self, inner: Sequence[int]) -> Sequence[int | Tensor]:
        """The coordinates of a sample's draws, where ranks hold parts of it."""
        region = self.inner or self.region
        if region is None and self.moment.here is not None:
            region = Region(time=self.moment.here)
        return inner if region is None else region.grid(inner)

    def uniform(self, shape: torch.Size, like: Tensor | None = None) -> Tensor:
        return self.draw(shape, lambda keys, inner: counter.uniform(counter.grid_bits(keys, inner)), like)

    def normal(self, shape: torch.Size, like: Tensor | None = None) -> Tensor:
        return self.draw(shape, lambda keys, inner: counter.normal(counter.grid_bits(keys, inner)), like)

    def dropped(self, x: Tensor, p: float, shape: torch.Size | None = None) -> Tensor:
        """``x`` with a fraction ``p`` zeroed and the rest scaled up; ``shape`` broadcasts one decision over dims."""
        if not 0 <= p <= 1:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        if p == 1:
            return x * 0
        keep = self.draw(shape or x.shape, lambda keys, inner: counter.keep_mask(keys, inner, p), x)
        return x * keep * (1 / (1 - p))
