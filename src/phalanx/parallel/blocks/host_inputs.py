"""``recompute=host``: what blocks keep for backward, their inputs, waits on the host, and comes back a block ahead.

Copies go beside what the device computes, both ways. An input leaves while its own block runs, and its memory is free
when the next block begins; in backward, the input of the block before comes while a block is computed again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import WrongUse
from phalanx.parallel.communication.copying import Copying
from phalanx.parallel.forward.wrapper import Forward, Layer
from phalanx.parallel.torch_private import version
from phalanx.trees import ends

LEAST_BYTES = 1 << 20
"""Less stays on the device: it is not worth a copy."""


class Parked:
    """An input that waits on the host."""

    def __init__(self, tensor: Tensor, host: Tensor, wait: Callable[[], None], before: Parked | None) -> None:
        """``wait`` has the device wait for the last copy; ``before``: what was parked before it."""
        self.host, self.wait = host, wait
        self.device, self.tensor, self._version = tensor.device, tensor, version(tensor)
        self.before = None if before is None else weakref.ref(before)

    tensor: Tensor | None
    """On the device, as long as it is there."""

    def leave(self) -> None:
        """The memory on the device may be used again."""
        if self.tensor is not None:
            if version(self.tensor) != self._version:
                raise WrongUse(
                    "a block writes to its input in place, which recompute=host may have copied before or after. Use "
                    "an operation that makes a new tensor, or leave recompute out."
                )
            self.wait()
            self.tensor = None

    def fetch(self, copying: Copying) -> None:
        """Begin to bring it back."""
        if self.tensor is None:
            self.tensor = torch.empty(self.host.shape, dtype=self.host.dtype, device=self.device)
            with copying.beside() as self.wait:
                self.tensor.copy_(self.host, non_blocking=True)


class HostRoom:
    """Where the inputs of all blocks wait; the last one's stays on the device too, since backward begins with it."""

    def __init__(self, device: torch.device) -> None:
        self._copying = Copying(device)
        self._newest: weakref.ref[Parked] | None = None

    def put(self, inputs: set[int], tensor: Tensor) -> Tensor | Parked:
        """``inputs``: where in memory those are that wait here."""
        if tensor.data_ptr() not in inputs:
            return tensor
        before = None if self._newest is None else self._newest()
        if before is not None:
            before.leave()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        with self._copying.beside() as wait:
            host.copy_(tensor, non_blocking=True)
        parked = Parked(tensor, host, wait, before)
        self._newest = weakref.ref(parked)
        return parked

    def take(self, kept: Tensor | Parked) -> Tensor:
        """What was put there, and the one before it is on its way. It may be asked for again."""
        if isinstance(kept, Tensor):
            return kept
        kept.fetch(self._copying)
        kept.wait()
        before = None if kept.before is None else kept.before()
        if before is not None:
            before.fetch(self._copying)
        tensor, kept.tensor = kept.tensor, None
        assert tensor is not None
        return tensor


class HostInputs(Layer):
    """The inputs of a block that is computed again, large ones that have gradients, wait on the host."""

    title = "inputs on the host"

    def __init__(self, room: HostRoom, device: torch.device, least_bytes: int = LEAST_BYTES) -> None:
        self.room, self.device, self.least_bytes = room, device, least_bytes

    def __call__(self, rest: Forward, *args: Any, **kwargs: Any) -> Any:
        inputs = {each.data_ptr() for each in ends((args, kwargs)) if isinstance(each, Tensor) and self._waits(each)}
        with torch.autograd.graph.saved_tensors_hooks(partial(self.room.put, inputs), self.room.take):
            return rest(*args, **kwargs)

    def _waits(self, tensor: Tensor) -> bool:
        return tensor.requires_grad and tensor.device.type == self.device.type and tensor.nbytes >= self.least_bytes
