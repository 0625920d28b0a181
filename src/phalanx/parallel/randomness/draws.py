"""Randomness inside a model that does not depend on the layout.

While a micro-batch is computed, every draw is keyed by (seed, step, block, call, global sample, position in the
sample). Recomputing a block draws the same numbers again. DTensor's random operations repeat values across shards on a
CPU mesh, and a device generator's state depends on what ran before it, hence this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phalanx import counter
from phalanx.parallel.forward.activations import WHOLE, Activations
from phalanx.parallel.forward.wrapper import Forward, Layer
from phalanx.parallel.randomness.sending import Sender

MOST_MICRO_BATCHES = 64
"""Whose keys are kept at a time: in an evaluation a step is long."""

Values = Callable[[Tensor, Sequence[int | Tensor]], Tensor]


@dataclass
class Moment:
    """Which micro-batch this rank computes just now."""

    step: int = 0
    slots: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    """The global batch's slots that this micro-batch holds."""
    real: bool = True
    """False for a stand-in, whose samples count for nothing."""
    recomputing: bool = False
    single: str = ""
    """Which micro-batches in training have one sample alone, and what to do; empty: none has."""

    @contextmanager
    def recompute(self, then: dict[str, Any]) -> Iterator[None]:
        """What was computed at another moment is computed again."""
        now = dict(vars(self))
        vars(self).update(then, recomputing=True)
        try:
            yield
        finally:
            vars(self).update(now)


class Replay:
    """A context to be entered whenever something is computed again, any number of times."""

    def __init__(self, enter: Callable[[], AbstractContextManager[None]]) -> None:
        self._make, self._entered = enter, list[AbstractContextManager[None]]()

    def __enter__(self) -> None:
        self._entered.append(self._make())
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


class Randomness:
    """Keyed draws. `scope` names the block that draws; draws are counted from its start."""

    def __init__(
        self, seed: int, moment: Moment, device: torch.device, activations: Activations | None = None,
        model: nn.Module | None = None,
    ) -> None:  # fmt: skip
        self.seed, self.moment, self.device, self.model = seed, moment, device, model
        self.activations = activations or Activations()
        """Which part of a sample is drawn for."""
        self.asked = False
        """Whether the model has called a random function."""
        self.may_draw = True
        """Whether it may still be the first time: not after a step in which it called none."""
        self.answers: AbstractContextManager[Any] | None = None
        """Entered with the outermost scope: what leads torch's own random functions here."""
        self.checkpointing: AbstractContextManager[Any] = nullcontext()
        """Entered with it: what runs a model's own calls of ``torch.utils.checkpoint``."""
        self.recomputes_blocks = False
        """Whether the model has just asked for blocks to be recomputed in backward."""
        self._depth, self._call = 0, 0
        self.packed_order: Tensor | None = None
        """Of the packed sequence that a recurrent module was called with last: the samples as they were sorted."""
        self.name = ""
        """Of the scope."""
        self.lengths: tuple[int, ...] | None = None
        """Of the scope's sequences, where its stream is known to have samples first, or several rows for each."""
        self._visits: dict[str, int] = {}
        self._keys: tuple[Tensor, Tensor] | None = None
        self._slots: tuple[np.ndarray, Tensor] | None = None
        self.sender = Sender(device)
        self._steps_keys = StepKeys(seed, self.sender)

    @contextmanager
    def scope(self, name: str, visit: int = 0, lengths: tuple[int, ...] | None = None) -> Iterator[None]:
        """Draws inside belong to ``name``, and to which of its visits in this micro-batch it is.

        ``lengths``: those that sequences have inside, where samples are known to come first (`lengths_of`).
        """
        if not self._depth:
            self._visits, self.recomputes_blocks = {}, False
        outer, before = (
            (self.name, self._call, self._keys, self.lengths),
            self.activations.hand(self.activations.stream),
        )
        self.name, self._call, self._keys = f"{name} {visit}" if visit else name, 0, None
        self.lengths = lengths
        self._depth += 1
        try:
            if self._depth > 1:
                yield
                return
            with self.checkpointing, self.answers or nullcontext():
                yield
        finally:
            self._depth -= 1
            self.name, self._call, self._keys, self.lengths = outer
            self.activations.hand(*before)

    def replayed(self) -> Replay:
        """What is computed from here on, to be computed again later: with the same draws, shards and samples."""
        state = self.name, self._call, dict(self._visits), self.lengths, self.activations.handing()
        return Replay(partial(self._replay, state, dict(vars(self.moment))))

    @contextmanager
    def _replay(self, state: tuple[Any, ...], then: dict[str, Any]) -> Iterator[None]:
        name, call, visits, lengths, layouts = state
        outer = dict(self._visits)
        with self.moment.recompute(then), self.activations.handed(*layouts), self.scope(name, 0, lengths):
            self._call, self._visits = call, dict(visits)
            try:
                yield
            finally:
                self._visits = outer

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
        outer, self._call = self._call, calls
        try:
            with self.activations.handed(WHOLE):
                yield
        finally:
            self._call = outer

    @property
    def inside(self) -> bool:
        """Whether something is computed whose draws are keyed."""
        return self._depth > 0

    def visit(self, name: str) -> int:
        """How often this was asked for a name before, in this micro-batch."""
        visit = self._visits.get(name, 0)
        self._visits[name] = visit + 1
        return visit

    def keys(self) -> tuple[Tensor, Tensor]:
        """A key for each sample of the micro-batch, and one for what all samples share."""
        if self._keys is None:
            self._keys = self._steps_keys.of(self.name, self.moment)
        if self._keys is None:
            shared = self._stream_there(self.name)
            self._keys = counter.mix(self._slots_there() * counter.STRIDE + shared), shared
        return self._keys

    def _stream_there(self, name: str) -> Tensor:
        """A scope's own key on the device."""

        def stream() -> int:
            return counter.key(self.seed, "forward", self.moment.step, name)

        if self.sender.recorded is not None:
            return self.sender(lambda: torch.tensor(stream()), self.moment.slots)
        return torch.full((), stream(), dtype=torch.int64, device=self.device)  # filled there, not copied

    def forget(self) -> None:
        """Keys that were made while a graph was recorded are nowhere else."""
        self._slots = None
        self._steps_keys.forget()

    def expect(self, names: Sequence[str]) -> None:
        """Scopes that draw in every step: their keys are made together."""
        self._steps_keys.names = {name: place for place, name in enumerate(names)}

    def _slots_there(self) -> Tensor:
        """This micro-batch's slots on the device: brought once, without waiting for it."""
        if self._slots is None or self._slots[0] is not self.moment.slots:
            there = self.sender(lambda: torch.from_numpy(self.moment.slots), self.moment.slots)
            self._slots = self.moment.slots, there
        return self._slots[1]

    def draw(self, shape: torch.Size, values: Values, like: Tensor | None = None) -> Tensor:
        """Random values of a shape: ``values(keys, inner)`` gives a grid of shape ``inner`` under each key.

        The batch is the first dim, or the second of three and more (``[time, batch, ...]``). In a draw ``like`` what
        the model computed it may be folded with others (``[batch * time, ...]``). Where a sample is several sequences,
        which the model has as its ``sequences``, those are folded so (``[batch * sequences, time, ...]``). Where both
        dims fit, the second is the batch only if the scope's stream may have it there, or the first one is as long as a
        sequence (``[time, batch, ...]``). What has no batch dim, and a draw like a weight, is the same on every rank.
        """
        self._call += 1
        self.asked = True
        if like is not None and like.is_meta:
            return like.new_empty(shape)  # another stage draws the values; here they only count
        rows, shared = self.keys()
        batch, call = rows.shape[0], counter.call_offset(self._call)
        folded = like is not None and bool(shape) and shape[0] % batch == 0
        several = getattr(self.model, "sequences", 1)
        if isinstance(like, nn.Parameter) or not shape or (len(shape) == 1 and shape[0] == 1):
            return values(counter.mix(shared + call), shape)
        if shape[0] == batch:
            return values(counter.mix(rows + call), self._grid(shape[1:])).view(shape)
        if like is not None and 1 < several == shape[0] / batch and len(shape) > 2:
            return values(counter.mix(rows + call), [several, *self._grid(shape[1:])]).view(shape)
        within = folded and self.lengths is not None and shape[0] not in self.lengths
        if len(shape) > 1 and shape[1] == batch and (len(shape) > 2 or not folded) and not within:
            return values(counter.mix(rows + call), self._grid([shape[0], *shape[2:]])).transpose(0, 1)
        if folded:
            return values(counter.mix(rows + call), self._grid([shape[0] // batch, *shape[1:]])).view(shape)
        return values(counter.mix(shared + call), shape)

    def lengths_of(self, stream: Tensor | None) -> tuple[int, ...] | None:
        """How long sequences are in a block that is called with this stream; None where its batch may come second."""
        batch = len(self.moment.slots)
        if stream is None or stream.ndim < 2 or stream.shape[0] % batch:
            return None
        if stream.shape[0] != batch and stream.shape[1] == batch:
            return None
        layout = self.activations.stream
        return (stream.shape[1], layout.length, layout.held) if stream.ndim == 3 else ()

    def _grid(self, inner: Sequence[int]) -> Sequence[int | Tensor]:
        """The coordinates of a sample's draws, where ranks hold parts of it."""
        return self.activations.layout.grid(inner)

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


class StepKeys:
    """The keys of all blocks in a step: what is sent to the device is sent once a step, and once a micro-batch."""

    def __init__(self, seed: int, sender: Sender) -> None:
        self.seed, self._sender = seed, sender
        self.names: dict[str, int] = {}
        """Of the blocks, each with its row."""
        self._step: int | None = None
        self._streams = torch.empty(0)
        self._rows: dict[int, tuple[np.ndarray, Tensor]] = {}
        """By the slots' id, the slots and their keys."""

    def of(self, name: str, moment: Moment) -> tuple[Tensor, Tensor] | None:
        """A block's keys; None of any other scope."""
        place = self.names.get(name)
        if place is None:
            return None
        if self._step != moment.step:
            self._begin(moment)
        found = self._rows.get(id(moment.slots))
        if found is None or found[0] is not moment.slots:
            found = self._rows[id(moment.slots)] = moment.slots, self._made(moment)
        return found[1][place, : len(moment.slots)], self._streams[place, 0]

    def _begin(self, moment: Moment) -> None:
        def streams() -> Tensor:  # by twos, as are rows of slots: what a compiled block is given begins at 16 bytes
            keys = [counter.key(self.seed, "forward", moment.step, name) for name in self.names]
            return torch.tensor(keys).unsqueeze(1).expand(-1, 2).contiguous()

        self._streams = self._sender(streams, moment.slots)
        self._step = moment.step
        self._rows.clear()

    def _made(self, moment: Moment) -> Tensor:
        if len(self._rows) >= MOST_MICRO_BATCHES:
            self._rows.clear()
        there = self._sender(lambda: torch.from_numpy(np.pad(moment.slots, (0, len(moment.slots) % 2))), moment.slots)
        return counter.mix(there * counter.STRIDE + self._streams[:, :1])

    def forget(self) -> None:
        """What was sent is in a graph: whoever computes without it sends it again."""
        self._step = None


class RandomKeys(Layer):
    """Draws of a block are keyed by its name, and by which of its calls in a micro-batch it is."""

    def __init__(self, name: str, randomness: Randomness) -> None:
        self.name, self.randomness = name, randomness
        self.title = f"random keys of {name}"

    def __call__(self, rest: Forward, *args: Any, **kwargs: Any) -> Any:
        stream = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        lengths = self.randomness.lengths_of(stream)
        with self.randomness.scope(self.name, self.randomness.visit(self.name), lengths):
            return rest(*args, **kwargs)
