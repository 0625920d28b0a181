"""How a rank keeps the weights of a run: where, in which dtypes, with whom it shares them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.memory import Buffers


@dataclass(frozen=True)
class Storage:
    """How the weights of a run are kept on this rank."""

    ranks: int
    """Ranks that share a weight: ``fsdp x cp``, or of experts those of them that hold the same."""
    rank: int
    group: Communicator
    parameter: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    device: torch.device
    home: torch.device
    """Where this rank's rows and their optimizer state live: the device, or the host if they are offloaded."""
    buffers: Buffers
    always_whole: bool
    """Whole weights stay in the device's memory between uses (ZeRO 1 and 2), or are gathered for each use (ZeRO 3)."""
    whole_gradients: bool
    """A rank's own gradients stay whole until the last micro-batch (ZeRO 1), or are summed after each and let go."""
    leaves: int = 0
    """Virtual micro-batches of this rank, where gradients are summed exactly; 0: they are added as they come."""

    @property
    def copies(self) -> bool:
        """Whether a rank has all of a weight beside each other twice: to update, and narrower to compute with."""
        beside = self.always_whole and self.ranks == 1 and self.home == self.device
        return beside and self.parameter != self.compute
