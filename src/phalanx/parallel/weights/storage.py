"""How a rank keeps the weights of a run: where, in which dtypes, with whom it shares them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from phalanx.layout import Layout
from phalanx.parallel.communication.codecs.chosen import Coding
from phalanx.parallel.communication.codecs.codec import Codec
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.copying import Copying
from phalanx.parallel.communication.memory import Buffers
from phalanx.parallel.communication.mesh import Mesh

if TYPE_CHECKING:
    from phalanx.parallel.weights.placement import StoragePolicy


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
    copying: Copying
    """From home to the device."""
    always_whole: bool
    """Whole weights stay in the device's memory between uses (ZeRO 1 and 2), or are gathered for each use (ZeRO 3)."""
    whole_gradients: bool
    """A rank's own gradients stay whole until the last micro-batch (ZeRO 1), or are summed after each and let go."""
    replicas: int = 1
    """Ranks that hold the same rows."""
    replica: int = 0
    """Which of them this is."""
    coding: Coding | None = None
    """How what is sent is made small."""
    leaves: int = 0
    """Virtual micro-batches of this rank, where gradients are summed exactly; 0: they are added as they come."""

    @classmethod
    def of(
        cls, policy: StoragePolicy, layout: Layout, mesh: Mesh, reduce: torch.dtype, device: torch.device,
        buffers: Buffers, copying: Copying,
    ) -> Storage:  # fmt: skip
        ranks = mesh.size(*policy.axes)
        return cls(
            ranks=ranks,
            rank=mesh.index(*policy.axes),
            group=mesh.group(*policy.axes),
            parameter=policy.dtype,
            compute=policy.compute,
            reduce=reduce,
            device=device,
            home=policy.home(device),
            buffers=buffers,
            copying=copying,
            always_whole=policy.always_whole,
            whole_gradients=layout.zero < 2 or ranks == 1,
            replicas=mesh.size("dp"),
            replica=mesh.index("dp"),
            coding=Coding.of(layout),
            leaves=layout.exact // layout.batch_ranks,
        )

    @property
    def copies(self) -> bool:
        """Whether a rank has all of a weight twice: to update, and narrower or on another device to compute with."""
        apart = (self.parameter, self.home) != (self.compute, self.device)
        return self.always_whole and self.ranks == 1 and apart

    @property
    def gathers(self) -> Codec | None:
        """How rows are made small for the others to have; whole weights are then not what is updated."""
        wide = self.parameter.is_floating_point and self.parameter.itemsize > 1
        return self.coding.weights if self.coding is not None and self.ranks > 1 and wide else None

    @property
    def offloaded(self) -> bool:
        return self.home != self.device
