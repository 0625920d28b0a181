"""By how much the clocks of hosts differ, as ranks see it that leave a collective together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from phalanx.train.engine import Engine

ROUNDS = 9


def ahead_ns(engine: Engine) -> int:
    """By how much this host's clock is ahead of the first host's. All ranks must call it; hosts of one do nothing."""
    hosts = engine.environment.hosts
    if len(set(hosts)) == 1:
        return 0
    own = []
    for _ in range(ROUNDS):
        engine.mesh.world.gathered(torch.zeros(1, device=engine.device)).sum().item()  # all leave it at about once
        own.append(time.time_ns())
    every = engine.mesh.world.gathered(torch.tensor(own, dtype=torch.int64, device=engine.device)).tolist()
    first = hosts.index(hosts[engine.rank])
    return difference(every[first], every[0])


def difference(own: Sequence[int], others: Sequence[int]) -> int:
    """Of two hosts' readings, one a round: the middle one, since a round may have been held up."""
    return round(median(a - b for a, b in zip(own, others, strict=True)))
