"""What random numbers are keyed by, on its way to the device; in a CUDA graph, to be sent anew when it is replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import WrongUse
from phalanx.kernels.transfer import sent

ARENA_BYTES = 1 << 22
Make = Callable[[], Tensor]


class Sender:
    """Small tensors brought to the device, which nobody waits for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.recorded: Resent | None = None
        """While a graph is recorded: where it will read what is sent."""

    def __call__(self, make: Make, slots: np.ndarray) -> Tensor:
        """``make`` is called again when a graph is replayed, for other ``slots`` in the place of these."""
        return sent(make(), self.device) if self.recorded is None else self.recorded.add(make, slots)


@dataclass
class Resent:
    """Memory of the host that a graph reads each time, and what to put there."""

    device: torch.device
    _arena: Tensor = field(init=False)
    _used: int = 0
    _makes: list[tuple[np.ndarray, Tensor, Make]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._arena = torch.empty(ARENA_BYTES, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def add(self, make: Make, slots: np.ndarray) -> Tensor:
        value = make()
        begin, self._used = self._used, self._used + -(-value.nbytes // 64) * 64
        if self._used > ARENA_BYTES:
            raise WrongUse(
                f"keys of a step's draws take more than the {ARENA_BYTES >> 20} MiB that a recorded step has. Leave "
                "graphs=step out, or compute fewer samples at once."
            )
        place = self._arena[begin : begin + value.nbytes].view(value.dtype).view(value.shape)
        place.copy_(value)
        self._makes.append((slots, place, make))
        return place.to(self.device, non_blocking=True)

    def renew(self, slots: np.ndarray) -> None:
        """The moment is another micro-batch's, in the place of the one that had these slots."""
        for whose, place, make in self._makes:
            if whose is slots:
                place.copy_(make())
