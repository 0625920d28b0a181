"""What a step has to send and to encode on a rank: ``comm=auto`` predicts by it what methods would take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.parallel.communication.mesh import SHARD
from phalanx.parallel.weights.bucket import Bucket
from phalanx.parallel.weights.coded import CodedGradients
from phalanx.parallel.weights.packing import Packing

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
    ranks, scattered = engine.mesh.size(*SHARD), _scatters(engine)
    gathered = sum(times * b.packing.length * b.storage.compute.itemsize for b, times in _gathers(engine))
    numbers = scattered * ranks * sum(each.length for each in coded)
    beside = (ranks - 1) * (gathered + scattered * _uncoded(engine))
    return CommWork((ranks - 1) * scattered * _bytes(coded), numbers, numbers, beside)


def _scatters(engine: Engine) -> int:
    """How often gradients are summed over shards in a step."""
    layout = engine.layout
    return layout.micro_batches(engine.task.global_batch) if layout.sums_each_micro_batch else 1


def _gathers(engine: Engine) -> Iterator[tuple[Bucket, int]]:
    """Each bucket, and how often its weights are gathered in a step."""
    gathering, micro_batches = engine.spread.gathering, engine.layout.micro_batches(engine.task.global_batch)
    units = {id(unit.bucket): unit for unit in (gathering.units if gathering is not None else ())}
    for bucket in engine.spread.buckets:
        unit = units.get(id(bucket))
        yield bucket, 1 if unit is None else micro_batches * (1 if unit.keep else 2)


def _uncoded(engine: Engine) -> float:
    """Bytes of gradients in coded buckets that ranks of other axes add to: they are sent as they are."""
    coded = [(b, b.coded) for b in engine.spread.buckets if b.coded is not None]
    return sum((b.gradient_packing.length - c.length) * c.storage.reduce.itemsize for b, c in coded)


def _bytes(coded: Sequence[CodedGradients]) -> float:
    return sum(each.length * each.storage.reduce.itemsize for each in coded)


def exact_bytes(engine: Engine) -> dict[str, float]:
    """Bytes that a rank would send in a step with ``comm=exact``, along the axis where it sends less; {}: nowhere.

    Over shards, of weights too.
    """
    layout, buckets = engine.layout, engine.spread.buckets
    gradients = sum(Packing(bucket.trainable).length * bucket.storage.reduce.itemsize for bucket in buckets)
    if layout.local or layout.coded_axis == "dp":
        group = engine.mesh.group("dp")
        return {group.name: 2 * (group.size - 1) / group.size * gradients}
    if not layout.coded_axis:
        return {}
    group = engine.mesh.group(*SHARD)
    weights = sum(n * Packing(b.weights).length * b.storage.compute.itemsize for b, n in _gathers(engine))
    return {group.name: (group.size - 1) * (_scatters(engine) * gradients + weights)}
