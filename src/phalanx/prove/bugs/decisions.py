"""Known bugs of what ranks decide together: the count to divide by, the norm to clip by, whether to skip a step."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from phalanx.prove.bugs.planting import bug
from phalanx.prove.bugs.seams import Replace, agreeing

TOTAL, COUNT, NORM = 0, 1, 2
"""What ranks agree on at the end of a step."""


@bug(3, "dp=2", "count", "dp")
def loss_by_local_count(replace: Replace) -> None:
    """Every rank divides by the tokens of its own samples, which are not as many as another's."""

    def change(own: Tensor, agreed: Tensor) -> None:
        agreed[COUNT] = own[COUNT] * dist.get_world_size()

    agreeing(replace, change)


@bug(12, "fsdp=2", "norm", "fsdp")
def clip_by_local_norm(replace: Replace) -> None:
    """Every rank clips by the norm of the gradients that it holds."""

    def change(own: Tensor, agreed: Tensor) -> None:
        agreed[NORM] = own[NORM]

    agreeing(replace, change)


@bug(24, "dp=2", "skip", "dp")
def overflow_not_shared(replace: Replace) -> None:
    """Every rank looks at its own gradients to decide whether to skip a step."""

    def change(own: Tensor, agreed: Tensor) -> None:
        if agreed[TOTAL].isnan():
            agreed[TOTAL], agreed[NORM] = own[TOTAL], 1.0

    agreeing(replace, change)


@bug(33, "dp=2", "skip", "dp")
def skip_decided_by_rank_0(replace: Replace) -> None:
    """A step is skipped if rank 0's loss is not a number; another rank's goes into everybody's weights."""

    def change(own: Tensor, agreed: Tensor) -> None:
        first = own.clone()
        dist.broadcast(first, 0)
        if agreed[TOTAL].isnan():
            agreed[TOTAL], agreed[NORM] = first[TOTAL], 1.0

    agreeing(replace, change)
