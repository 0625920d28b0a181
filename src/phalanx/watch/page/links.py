"""Who talks to whom: bytes from rank to rank and seconds of waiting, by axis, as the last flight records have them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from phalanx import flight
from phalanx.flight import DTYPES, HEADER, KINDS, ON_GPU, PHASES, Flight
from phalanx.folder_files import note, reading
from phalanx.run import Run
from phalanx.words import many, six_digits

MOST_ROWS = 64
"""So many ranks the picture shows by themselves; of more than that several share a row."""
MOST_PAIRS = 60
"""So many pairs of ranks the table has, those that send most."""
IN_STEPS = ("forward", "backward", "reduce", "update", "wait")
"""Phases of a step: what is sent between two steps is not counted."""
_IN_STEPS = [PHASES.index(phase) for phase in IN_STEPS]
BYTES = (4, 4, 8, 2, 2, 8, 4, 2, 1, 1, 1, 1, 1)
"""Of an element, by its number in `DTYPES`; of an unknown one as of a float32."""
NEIGHBOURS = ("send",)
"""Kinds that go to one rank: along a pipeline to the next stage in forward, to the one before in backward."""
LOOKED_AT = 8
"""Generations, in which one with records is looked for."""
MOST_NUMBERS = 1 << 25
"""From each rank to each, along all axes."""
HEAD_BYTES = 4096
"""Of a packed record: enough to know whose it is."""
assert len(BYTES) == len(DTYPES)


@dataclass
class AxisUse:
    """Of one axis, a step: ``sent`` from rank to rank, and of each rank ``calls`` and seconds ``waited``."""

    sent: np.ndarray
    calls: np.ndarray
    waited: np.ndarray
    """nan: a GPU waits, and no record says how long."""
    groups: int = 0
    size: int = 0


def read(run: Run) -> dict[str, Any]:
    """Of the newest generation that has any records."""
    for generation in reversed(flight.generations(run)[-LOOKED_AT:]):
        flights = flight.read(run, generation)
        if flights:
            return told(use(flights, run.path), {rank: each.host for rank, each in flights.items()}, _steps(flights))
    return told({}, {}, np.zeros(0, np.int64))


def hosts(run: Run) -> list[str]:
    """Of every rank, by the head of its newest record; "": nobody knows."""
    newest = flight.generations(run)[-1:]
    return list(_hosts(run.path, tuple(item for each in newest for item in flight.paths(run, each).items())))


@lru_cache(16)
def _hosts(folder: Path, paths: tuple[tuple[int, Path], ...]) -> tuple[str, ...]:
    """A generation's ranks stay where they are."""
    found: dict[int, str] = {}
    for rank, path in paths:
        with suppress(OSError, ValueError, zlib.error, struct.error), reading(folder, path) as file:
            head = zlib.decompressobj().decompress(file.read(HEAD_BYTES), HEADER.size)
            *_, host, _ = HEADER.unpack(head)
            found[rank] = host.partition(b"\0")[0].decode(errors="replace")
    return tuple(found.get(rank, "") for rank in range(max(found, default=-1) + 1))


def _steps(flights: Mapping[int, Flight]) -> np.ndarray:
    """Those that every rank's record has from beginning to end."""
    found: list[set[int]] = []
    for each in flights.values():
        rows = each.collectives
        steps = np.unique(rows["step"][np.isin(rows["phase"], _IN_STEPS)]).tolist()
        found.append(set(steps[1:-1]))
    return np.array(sorted(set.intersection(*found)) if found else [], np.int64)


def use(flights: Mapping[int, Flight], folder: Path = Path("a run")) -> dict[str, AxisUse]:
    """By axis; nothing, and a note, where the run in that folder has too many ranks to be drawn."""
    steps, world = _steps(flights), max(flights, default=-1) + 1
    if not len(steps):
        return {}
    axes = {group.axis for each in flights.values() for group in each.groups.values()}
    if len(axes) * world**2 > MOST_NUMBERS:
        extent = f"{many(world, 'rank')} along {many(len(axes), 'axis', 'axes')}"
        note(f"{folder} has {extent}: who talks to whom is not shown")
        return {}
    members: dict[tuple[str, str], list[int]] = {}
    for rank, each in sorted(flights.items()):
        for group in each.groups.values():
            members.setdefault((group.axis, group.name), []).append(rank)
    found: dict[str, AxisUse] = {}
    for (axis, name), ranks in members.items():
        size = max(flights[rank].groups[name].size for rank in ranks)
        empty = AxisUse(np.zeros((world, world)), np.zeros(world), np.zeros(world))
        own = found.setdefault(axis, empty)
        own.groups, own.size = own.groups + 1, max(own.size, size)
        for rank in ranks:
            _add(own, flights[rank], name, ranks, size, steps)
    return {axis: own for axis, own in found.items() if own.calls.any()}


def _add(own: AxisUse, flown: Flight, name: str, ranks: list[int], size: int, steps: np.ndarray) -> None:
    """What one rank did along a group: what goes to all of them is taken to go to each alike."""
    rows = flown.along(name)
    rows = rows[np.isin(rows["step"], steps) & np.isin(rows["phase"], _IN_STEPS)]
    others = [rank for rank in ranks if rank != flown.rank]
    own.calls[flown.rank] += len(rows) / len(steps)
    if not others or not len(rows):
        return
    straight = np.isin(rows["kind"], [KINDS.index(kind) for kind in NEIGHBOURS])
    own.sent[flown.rank, others] += sent_bytes(rows[~straight], size).sum() / len(steps) / len(others)
    for phase, turn in (("forward", 1), ("backward", -1)):
        going = rows[straight & ((rows["phase"] == PHASES.index("backward")) == (phase == "backward"))]
        to = ranks[(ranks.index(flown.rank) + turn) % len(ranks)]
        own.sent[flown.rank, to] += sent_bytes(going, size).sum() / len(steps)
    on_gpu = (rows["flags"] & ON_GPU).astype(bool)
    waited = np.where((rows["waiting"] > 0) & (rows["left"] > rows["waiting"]), rows["left"] - rows["waiting"], 0)
    own.waited[flown.rank] += np.nan if on_gpu.all() else waited[~on_gpu].sum() / 1e9 / len(steps)


def sent_bytes(rows: np.ndarray, size: int) -> np.ndarray:
    """What a rank sends in each of these collectives among so many, as `Traffic.sent` counts it."""
    dims = rows["flags"] >> 1
    shape = np.where(np.arange(4) < dims[:, None], rows["shape"], 1).astype(np.float64)
    share = {
        "all-reduce": 2 * (size - 1) / size, "all-gather": size - 1, "reduce-scatter": size - 1,
        "all-to-all": (size - 1) / size, "broadcast": 1 / size, "send": 1, "receive": 0, "words": size - 1,
    }  # fmt: skip
    by_kind = np.array([share.get(kind, 0.0) for kind in KINDS])
    return np.asarray(shape.prod(1) * np.array(BYTES)[rows["dtype"]] * by_kind[rows["kind"]])


def told(found: Mapping[str, AxisUse], ran: Mapping[int, str], steps: np.ndarray) -> dict[str, Any]:
    """For the page: a matrix an axis, and tables. ``ran``: the host of each rank."""
    world = max(ran, default=-1) + 1
    share = -(-max(1, world) // MOST_ROWS)
    return {
        "first": int(steps[0]) if len(steps) else 0, "last": int(steps[-1]) + 1 if len(steps) else 0,
        "ranks": world, "ranks_a_row": share,
        "hosts": [ran.get(rank, "") for rank in range(world)],
        "axes": {
            axis: {
                "groups": own.groups, "size": own.size, "sent": _folded(own.sent, share),
                "calls": six_digits(own.calls.max()), "waits": [six_digits(value) for value in own.waited.tolist()],
                "pairs": _pairs(own.sent),
            }
            for axis, own in sorted(found.items(), key=lambda item: -item[1].sent.sum())
        },
    }  # fmt: skip


def _folded(sent: np.ndarray, share: int) -> list[list[float]]:
    begins = np.arange(0, len(sent), share)
    folded = np.add.reduceat(np.add.reduceat(sent, begins, axis=0), begins, axis=1)
    return [[float(f"{value:.4g}") for value in row] for row in folded.tolist()]


def _pairs(sent: np.ndarray) -> list[list[float]]:
    """From whom, to whom, how many bytes a step; those that send most first."""
    order = np.argsort(-sent, axis=None, kind="stable")[:MOST_PAIRS]
    pairs = [divmod(int(at), len(sent)) for at in order]
    return [[a, b, float(f"{sent[a, b]:.4g}")] for a, b in pairs if sent[a, b] > 0]
