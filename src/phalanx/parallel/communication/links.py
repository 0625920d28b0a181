"""How fast ranks reach each other: a few megabytes from each to another, timed, before the first step."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

MEGABYTES = 4
Rates = dict[tuple[int, int], float]
"""Bytes a second from one rank to another."""


def ring(device: torch.device, megabytes: int = MEGABYTES) -> Rates:
    """From each rank to the next, all at once; on rank 0 all of them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return _timed([((rank - 1) % world, (rank + 1) % world)], device, megabytes)


def pairs(ranks: Sequence[int], device: torch.device, megabytes: int = MEGABYTES) -> Rates:
    """Between any two of these ranks, a round after another in which each has one partner; on rank 0 all of them.

    Every rank of the world calls it.
    """
    rounds = [dict(_round(ranks, number)) for number in range(len(ranks) - 1 + len(ranks) % 2)]
    partners = [found.get(dist.get_rank()) for found in rounds]
    return _timed([(partner, partner) for partner in partners], device, megabytes)


def _round(ranks: Sequence[int], number: int) -> list[tuple[int, int]]:
    """Who meets whom in a round of a tournament, both ways."""
    seats: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    turning = seats[1:]
    turning = turning[number:] + turning[:number]
    order = [seats[0], *turning]
    half = len(order) // 2
    met = list(zip(order[:half], reversed(order[half:]), strict=True))
    return [pair for a, b in met if a is not None and b is not None for pair in ((a, b), (b, a))]


def _timed(partners: Sequence[tuple[int | None, int | None]], device: torch.device, megabytes: int) -> Rates:
    """``partners``: a round after another, from whom this rank receives and to whom it sends."""
    rank, world = dist.get_rank(), dist.get_world_size()
    out = torch.zeros(megabytes << 20, dtype=torch.uint8, device=device)
    into = torch.empty_like(out)
    found = torch.full((len(partners), 2), -1.0, dtype=torch.float64)
    for number, (source, to) in enumerate(partners):
        for _ in range(2):  # the first makes the connection
            dist.barrier()
            began = time.perf_counter()
            if source is not None and to is not None:
                _exchange(out, into, source, to)
                found[number] = torch.tensor([source, time.perf_counter() - began], dtype=torch.float64)
    every = [torch.empty_like(found, device=device) for _ in range(world)]
    dist.all_gather(every, found.to(device))
    rates = {}
    for receiver, rounds in enumerate(every):
        for source, seconds in rounds.tolist():
            if source >= 0 and source != receiver:
                rates[int(source), receiver] = out.numel() / seconds
    return rates if rank == 0 else {}


def _exchange(out: Tensor, into: Tensor, source: int, to: int) -> None:
    """Both at once: over NCCL one after the other would wait for ever."""
    operations = [dist.P2POp(dist.isend, out, to), dist.P2POp(dist.irecv, into, source)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    if out.is_cuda:
        torch.cuda.synchronize(out.device)
