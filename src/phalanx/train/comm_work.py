"""What a step has to send and to encode on a rank, by which ``comm=auto`` predicts what methods would take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.parallel.communication.mesh import SHARD
from phalanx.parallel.weights.coded import CodedGradients

if TYPE_CHECKING:
    from phalanx.train.engine import Engine


@dataclass(frozen=True)
class CommWork:
    """Of a step on one rank."""

    sent: float
    """Bytes of exact gradients."""
    encoded: float
    """Numbers, where they travel in few bits."""
    decoded: float
    beside: float = 0.0
    """Bytes that travel along the same axis as they are: weights that are gathered, gradients that others add to."""
    straight: float = 1.0
    """The part of what is encoded that goes from rank to rank, wherever they are: not what is gathered."""


def over_replicas(engine: Engine, coded: Sequence[CodedGradients]) -> CommWork:
    """Each part goes to who sums it, and its sum to all."""
    ranks, numbers = engine.mesh.size("dp"), sum(each.length for each in coded)
    share = 2 * (ranks - 1) / ranks
    return CommWork(share * _bytes(coded), numbers * (1 + 1 / ranks), 2 * numbers, share * _uncoded(engine), 1 / 2)


def over_shards(engine: Engine, coded: Sequence[CodedGradients]) -> CommWork:
    """Gradients are scattered, after each micro-batch under ZeRO 2 and 3; weights gathered, under ZeRO 3 for each use.

    Those that stay whole from forward to backward are gathered once for both.
    """
    layout, spread, ranks = engine.layout, engine.spread, engine.mesh.size(*SHARD)
    micro_batches = layout.micro_batches(engine.task.global_batch)
    scattered = micro_batches if layout.sums_each_micro_batch else 1
    units = {id(unit.bucket): unit for unit in (spread.gathering.units if spread.gathering is not None else ())}
    gathered = 0.0
    for bucket in spread.buckets:
        unit = units.get(id(bucket))
        times = 1 if unit is None else micro_batches * (1 if unit.keep else 2)
        gathered += times * bucket.packing.length * bucket.storage.compute.itemsize
    numbers = scattered * ranks * sum(each.length for each in coded)
    beside = (ranks - 1) * (gathered + scattered * _uncoded(engine))
    return CommWork((ranks - 1) * scattered * _bytes(coded), numbers, numbers, beside)


def _uncoded(engine: Engine) -> float:
    """Bytes of gradients in coded buckets that ranks of other axes add to: they are sent as they are."""
    coded = [(b, b.coded) for b in engine.spread.buckets if b.coded is not None]
    return sum((b.gradient_packing.length - c.length) * c.storage.reduce.itemsize for b, c in coded)


def _bytes(coded: Sequence[CodedGradients]) -> float:
    return sum(each.length * each.storage.reduce.itemsize for each in coded)
