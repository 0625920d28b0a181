"""Where blocks begin and end: the residual stream is sharded before the first block and whole again after the last.

Under context parallelism a rank takes its positions of every sequence; under sequence parallelism (tp) it takes its
shard of those. At the first block of a later pipeline stage the stream is received, sharded as it was sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import WrongUse
from phalanx.parallel.axes.context import ContextParallel
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.differentiable import all_gather, run, shard
from phalanx.parallel.forward.activations import ActivationLayout, Activations
from phalanx.parallel.forward.calls import TIME, stream, with_stream
from phalanx.parallel.forward.wrapper import Forward, Layer

Receive = Callable[[str, Any, Any], tuple[Any, Any] | None]
"""``(block, args, kwargs)`` with the stream that came from the stage before; None where none did."""


class SequenceSharding:
    """What the residual stream is sharded by: over ``cp`` first, and each rank's positions over ``tp``."""

    def __init__(
        self, activations: Activations, context: ContextParallel | None, tp: Communicator, device: torch.device
    ) -> None:
        self.activations, self.context, self.tp, self.device = activations, context, tp, device
        sizes = {"cp": 1 if context is None else context.ranks, "tp": tp.size}
        self.axes = {axis: size for axis, size in sizes.items() if size > 1}

    def layout(self, length: int) -> ActivationLayout:
        """Of sequences of this length, from the first block to the last."""
        positions = None if self.context is None else self.context.places(length, self.context.rank)
        time = positions
        if not self.tp.alone:
            every = torch.arange(length, device=self.device) if positions is None else positions
            time = every[slice(*run(len(every), self.tp.size, self.tp.rank))]
        return ActivationLayout(length, positions, time)

    def shard(self, whole: Tensor) -> Tensor:
        """This rank's shard of a stream."""
        own = whole if self.context is None else self.context.own(whole, TIME)
        return shard(own, TIME, self.tp)

    def unshard(self, own: Tensor) -> Tensor:
        """The whole stream, from every rank's shard."""
        held = all_gather(own, TIME, self.activations.stream.held, self.tp, to="invariant")
        return held if self.context is None else self.context.whole(held, TIME)


class Boundary(Layer):
    """A block's place between the first and the last."""

    def __init__(
        self, name: str, sharding: SequenceSharding, first: bool, last: bool, receive: Receive | None = None
    ) -> None:
        self.name, self.sharding, self.first, self.last, self.receive = name, sharding, first, last, receive
        over = f"sequence over {', '.join(sharding.axes)}" if sharding.axes else "stream"
        place = "enter and leave" if first and last else "enter" if first else "leave" if last else "within"
        self.title = f"{place}: {over}"

    def __call__(self, rest: Forward, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._enter(args, kwargs)
        output = rest(*args, **kwargs)
        return self._leave(output) if self.last and self.sharding.axes else output

    def _enter(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        received = None if self.receive is None else self.receive(self.name, args, kwargs)
        if not self.sharding.axes:
            return received or (args, kwargs)
        if received is None and not self.first:
            self._check()
            return args, kwargs
        whole = stream(args, kwargs, self.name)
        self.sharding.activations.enter(self.sharding.layout(whole.shape[TIME]))
        return received or with_stream(args, kwargs, self.sharding.shard(whole))

    def _check(self) -> None:
        if self.sharding.activations.stream.time is None:
            axis, size = next(iter(self.sharding.axes.items()))
            raise WrongUse(
                f"{self.name} is called out of order, so {axis}={size} cannot tell which positions it has. Call blocks "
                f"one after another, each once, or use fsdp instead of {axis}."
            )

    def _leave(self, output: Any) -> Any:
        rest = output[1:] if isinstance(output, tuple) else None
        whole = self.sharding.unshard(output if rest is None else output[0])
        self.sharding.activations.leave()
        return whole if rest is None else (whole, *rest)
