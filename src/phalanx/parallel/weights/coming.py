"""Weights that stay whole (ZeRO 1 and 2) on their way after an update, while the next step begins.

After an update every rank gathers the buckets in the order in which forward needs them, whatever its data will make it
use, and two at a time, so that no more memory is needed than to wait for them. On gloo threads see to it; on a GPU a
stream of its own does, for which the stream that computes waits by an event. Until a bucket is there its parameters are
`ComingWeight`: whoever reads one, the whole or the rows that this rank owns, waits for that bucket first. Blocks and
other units wait for theirs before their forward. So that waits for the first bucket while the others travel, and nobody
else has to know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from phalanx.anatomy import Unit
from phalanx.parallel.communication.background import InBackground
from phalanx.parallel.communication.copying import Copying
from phalanx.parallel.communication.launched import Launched
from phalanx.parallel.communication.pending import Pending
from phalanx.parallel.torch_private import as_plain_tensors
from phalanx.parallel.weights.bucket import Bucket
from phalanx.parallel.weights.shard import reads_values
from phalanx.trees import leaves


class ComingWeight(nn.Parameter):
    """What a parameter is while new values are on their way into its memory, whoever has it."""

    arrival: Arrival

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if reads_values(func):
            for parameter in leaves((args, kwargs), ComingWeight):
                parameter.arrival.need()
        with as_plain_tensors():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.arrival.need()
        return self.__deepcopy__(memo)  # it is a plain parameter now


class Arrival:
    """A bucket on its way."""

    def __init__(self, bucket: Bucket, coming: list[Arrival]) -> None:
        """``coming``: all that are."""
        self.bucket, self._coming = bucket, coming
        self._parameters = [
            parameter
            for weight in bucket.weights
            for parameter in ((weight.full,) if weight.shard is weight.full else (weight.full, weight.shard))
        ]
        self._pending: Pending | None = None

    def expect(self, pending: Pending) -> None:
        """From here on, who reads waits for this."""
        self._pending = pending
        self._coming.append(self)
        for parameter in self._parameters:
            parameter.arrival = self  # type: ignore[attr-defined]
            parameter.__class__ = ComingWeight

    def need(self) -> None:
        """Whole now. Costs nothing if it is."""
        if self._pending is None:
            return
        self._pending.wait()
        self._pending = None
        self._coming.remove(self)
        for parameter in self._parameters:
            parameter.__class__ = nn.Parameter
            del parameter.arrival  # type: ignore[attr-defined]


class Coming:
    """All buckets that stay whole, and those of them that are on their way."""

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], buckets: Sequence[Bucket], names: Sequence[str],
        device: torch.device,
    ) -> None:  # fmt: skip
        """``names``: of all weights, in the order in which forward needs them."""
        self.on_their_way: list[Arrival] = []
        self._order = {name: place for place, name in enumerate(names)}
        whole = sorted((bucket for bucket in buckets if bucket.storage.always_whole), key=self._place)
        self._arrivals = {id(bucket): Arrival(bucket, self.on_their_way) for bucket in whole}
        self._beside = Copying(device)
        for unit in units:  # what a module's own code is given, or a compiler, are plain parameters
            own = {*unit.weights}
            needed = [a for a in self._arrivals.values() if own.intersection(w.name for w in a.bucket.weights)]
            for name in unit.modules if needed else ():
                model.get_submodule(name).register_forward_pre_hook(partial(_need_each, needed), prepend=True)

    def start(self, buckets: Sequence[Bucket]) -> None:
        """Begin to gather buckets, those first that forward needs first. All ranks must name the same."""
        buckets = sorted(buckets, key=self._place)
        for bucket in buckets:
            bucket.is_whole = False
        alone = [bucket for bucket in buckets if bucket.storage.group.alone]
        together = [bucket for bucket in buckets if not bucket.storage.group.alone]
        for index, bucket in enumerate(alone):
            for near in alone[index : index + 2]:
                near.start_gather()  # the next is on its way while this one is unpacked
            bucket.finish_gather()
        reserved = [(bucket, bucket.reserve_gather()) for bucket in together]
        if self._beside.device.type == "cuda":
            self._on_stream(reserved)
        else:
            self._on_threads(reserved)

    def _on_stream(self, reserved: Sequence[tuple[Bucket, Launched]]) -> None:
        device = self._beside.device
        computing = torch.cuda.current_stream(device)
        for index, (bucket, waiting) in enumerate(reserved):
            with self._beside.beside() as arrived:
                for near, _ in reserved[index : index + 2]:
                    near.start_gather()
                bucket.finish_gather()
            self._arrivals[id(bucket)].expect(_OnStream(arrived, computing, waiting))

    def _on_threads(self, reserved: Sequence[tuple[Bucket, Launched]]) -> None:
        taken: list[Pending] = []
        for bucket, waiting in reserved:
            before = taken[-2] if len(taken) > 1 else None
            pending = Pending((), partial(_launch, bucket, before))
            taken.append(bucket.storage.group.in_background(pending, waiting))
        for (bucket, _), pending in zip(reserved, taken, strict=True):
            self._arrivals[id(bucket)].expect(pending)

    def _place(self, bucket: Bucket) -> int:
        """When forward first needs it."""
        return min(self._order[weight.name] for weight in bucket.weights)

    def settle(self) -> None:
        """Wait for all that is on its way."""
        while self.on_their_way:
            self.on_their_way[0].need()


class _OnStream(Pending):
    """What a stream does beside the one that computes, which waits for it. The host does not."""

    __slots__ = ("_arrived", "_computing")

    def __init__(self, arrived: Callable[[], None], computing: torch.cuda.Stream, waiting: Launched) -> None:
        super().__init__((), None, waiting)
        self._arrived, self._computing = arrived, computing

    def wait(self) -> None:
        current = torch.cuda.current_stream(self._computing.device)
        with torch.cuda.stream(self._computing), self._waiting:
            self._arrived()
        if current != self._computing:  # somebody reads on a stream of his own
            self._arrived()


def _launch(bucket: Bucket, before: Pending | None) -> Pending:
    """On a thread: begin to gather a bucket once the last but one is there."""
    if isinstance(before, InBackground):
        before.ended()
    with as_plain_tensors():
        bucket.start_gather()
    return Pending((), partial(_finish, bucket))


def _finish(bucket: Bucket) -> None:
    with as_plain_tensors():
        bucket.finish_gather()


def _need_each(arrivals: Sequence[Arrival], module: nn.Module, args: Any) -> None:
    for arrival in arrivals:
        arrival.need()
