"""How fast ranks reach each other: a few megabytes from each to another, timed, before the first step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.pending import Pending

MEGABYTES = 4
SMALLEST, LARGEST = 1 << 16, 1 << 22
"""Bytes to each rank with which a group's speed is measured: as few as take long enough to be timed."""
SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 23)
"""Bytes of messages between two ranks whose link is measured."""
LONG_ENOUGH = 0.01
"""Seconds."""
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


def rounds_of(ranks: Sequence[int], all_pairs: bool) -> list[list[tuple[int, int]]]:
    """Who is measured with whom, each rank once a round: any two of these ranks, or each with the next."""
    if all_pairs:
        every = [_round(ranks, number) for number in range(len(ranks) - 1 + len(ranks) % 2)]
        return [[(a, b) for a, b in found if a < b] for found in every]
    ring = [(a, b) for a, b in zip(ranks, [*ranks[1:], ranks[0]], strict=True) if a != b]
    turns = [ring[0::2], ring[1::2]] if len(ring) % 2 == 0 else [ring[0:-1:2], ring[1::2], ring[-1:]]
    return [found for found in turns if found]


@dataclass(frozen=True)
class PairSpeed:
    """Of the link between two ranks."""

    ranks: tuple[int, int]
    latency: float
    """Seconds that a byte takes to the other."""
    forth: dict[int, float]
    """By size of a message: bytes a second from the first to the second."""
    back: dict[int, float]
    both: float
    """Bytes a second each way, with the largest messages both ways at once."""


def measured_pairs(rounds: Sequence[Sequence[tuple[int, int]]], device: torch.device) -> list[PairSpeed]:
    """A round after another. Every rank of the world calls it; the first of a pair has its speed."""
    found = []
    for met in rounds:
        dist.barrier()
        own = next((pair for pair in met if dist.get_rank() in pair), None)
        if own is not None:
            speed = _pair(own, device)
            found += [speed] if dist.get_rank() == own[0] else []
    dist.barrier()
    return found


def _pair(pair: tuple[int, int], device: torch.device) -> PairSpeed:
    first = dist.get_rank() == pair[0]
    other = pair[1] if first else pair[0]
    byte = torch.zeros(1, dtype=torch.uint8, device=device)

    def passed(size: int, sends: bool, both: bool = False) -> float:
        """Seconds until as many bytes are there and the receiver has said so, or both have all."""
        out, into = torch.zeros(2, size, dtype=torch.uint8, device=device)
        _handed(byte, other, first)
        _handed(byte, other, not first)  # both begin now
        began = time.perf_counter()
        if both:
            _exchange(out, into, other, other)
        else:
            _handed(out, other, sends)
            _handed(byte, other, not sends)
        return time.perf_counter() - began

    smallest = min(passed(1, first) for _ in range(10))
    there, here = ({size: min(passed(size, sends) for _ in range(3)) for size in SIZES} for sends in (first, not first))
    latency = min(smallest, *there.values(), *here.values()) / 2  # on a busy machine any of them may have been held up
    forth, back = ({size: size / (taken - latency) for size, taken in way.items()} for way in (there, here))
    largest = SIZES[-1]
    return PairSpeed(pair, latency, forth, back, largest / min(passed(largest, first, both=True) for _ in range(2)))


def _handed(tensor: Tensor, other: int, sends: bool) -> None:
    """From one rank of a pair to the other."""
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend if sends else dist.irecv, tensor, other)]):
        work.wait()
    synchronize(tensor.device)


@dataclass(frozen=True)
class Speed:
    """Of what each rank of a group sends to all others at once: the slowest rank's."""

    latency: float
    """Seconds that the smallest message takes."""
    rate: float
    """Bytes a second that a rank sends, and receives at the same time."""
    size: int
    """Bytes to each rank with which this was measured."""


def round_trip(group: Communicator, device: torch.device) -> float:
    """Seconds until the smallest messages are there, and on gloo the words before them that their receivers are ready.

    All ranks of the group must call it, and find the same.
    """
    return min(_exchanged(group, 1, device) for _ in range(3))


def along(group: Communicator, device: torch.device, size: int = SMALLEST) -> Speed:
    """Measure a group. All of its ranks must call it, with the same ``size`` to begin with, and find the same."""
    latency = round_trip(group, device)
    while True:
        taken = _exchanged(group, size, device)
        latency = min(latency, taken)  # the smallest may have been held up
        seconds = max(taken - latency, taken / 2)
        if seconds >= LONG_ENOUGH or size >= LARGEST:
            return Speed(latency, size * (group.size - 1) / seconds, size)
        size = min(LARGEST, 4 * size)


def hosts_first(group: Communicator, device: torch.device, speed: Speed) -> float:
    """Bytes a second that a rank sends in an all-gather that goes inside of hosts, where they do; else the link's rate.

    ``speed``: of the link. All of the group must call it, and find the same.
    """
    if not group.hosts_first:
        return speed.rate
    size = max(speed.size, group.small_bytes // group.size + 1)
    rows = torch.zeros(group.size, size, dtype=torch.uint8, device=device)
    taken = min(_slowest(group, device, lambda: group.all_gather(rows, rows[group.rank])) for _ in range(2))
    return rows[1:].numel() / max(taken - speed.latency, taken / 2)


def _exchanged(group: Communicator, size: int, device: torch.device) -> float:
    """Seconds until each rank had so many bytes from every other, of the rank that took longest."""
    rows = torch.zeros(group.size, size, dtype=torch.uint8, device=device)
    received = torch.empty_like(rows)
    return _slowest(group, device, lambda: group.exchange(received, rows))


def _slowest(group: Communicator, device: torch.device, launch: Callable[[], Pending]) -> float:
    """Seconds that a collective took the rank that took longest."""
    seconds = torch.zeros(1, dtype=torch.float64, device=device)
    group.all_reduce_max(seconds)  # all begin now
    synchronize(device)
    began = time.perf_counter()
    launch().wait()
    synchronize(device)
    seconds += time.perf_counter() - began
    group.all_reduce_max(seconds)
    return float(seconds)


def synchronize(device: torch.device) -> None:
    """Until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
    operations = [dist.P2POp(dist.irecv, into, source), dist.P2POp(dist.isend, out, to)]  # see `peers`
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    if out.is_cuda:
        torch.cuda.synchronize(out.device)
