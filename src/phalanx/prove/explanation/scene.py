"""The scene of a difference: what all ranks and one device did in one step, and where they first part.

Some rungs only a record shows: random draws, what modules gave and got back, what each rank's own backward made.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from phalanx.layout import Layout
from phalanx.prove.explanation import algebra
from phalanx.prove.ladder import Difference, Standard, first, off, size
from phalanx.prove.ranks.pieces import Piece
from phalanx.prove.ranks.record import Record, WholeStep, by_axis
from phalanx.task import Task

SUMS: tuple[tuple[str, ...], ...] = ((), ("cp",), ("tp",), ("cp", "tp"))
"""Over which axes parts of an activation's gradient may add up to the whole."""


class Scene:
    """All that is known of one failing run: the smallest layout that fails, what ranks and one device did in it."""

    def __init__(
        self,
        task: Task,
        layout: Layout,
        standard: Standard,
        differences: Sequence[Difference],
        records: Sequence[Record],
        whole: WholeStep,
        axes: Sequence[str],
    ) -> None:
        self.task, self.layout, self.standard, self.differences = task, layout, standard, list(differences)
        self.records, self.whole, self.axes = list(records), whole, list(axes)
        self.partial: tuple[str, tuple[str, ...]] | None = None
        """The last module in backward of whose gradient ranks have parts that add up, and over which axes."""
        self.step = first(differences)[0].step
        self.bar = standard.bar
        degrees = {axis: getattr(layout, axis) for axis in ("ep", "tp", "cp", "pp", "fsdp", "dp")}
        want = standard.steps[self.step]
        self.sizes = {
            **{axis: n for axis, n in degrees.items() if n > 1},
            "micro-batches": layout.micro_batches(task.global_batch),
            "the count of the batch": want.count,
            "the samples of the batch": len(want.ids),
            "the clip factor": want.clip_factor,
        }

    def record_of(self, rank: int) -> Record:
        return next(record for record in self.records if record.rank == rank)

    def recorded(self) -> list[Difference]:
        """The first rung of the record that differs, with all that differs there."""
        for find in (self._drawn, self._forward, self._backward, self._before_reduction):
            found = list(find())
            if found:
                return found
        return []

    def _drawn(self) -> Iterator[Difference]:
        yield from self._pieces("random draws", "draws", self.whole.draws)

    def _forward(self) -> Iterator[Difference]:
        """Of the first module that differs anywhere."""
        found = self._pieces("activations", "activations", self.whole.activations)
        lead = next(found, None)
        if lead is not None:
            yield lead
            yield from itertools.takewhile(lambda d: d.name == lead.name, found)

    def _pieces(self, rung: str, kind: str, wholes: dict[str, Tensor]) -> Iterator[Difference]:
        """In the order in which one device has them."""
        scale = largest(wholes.values())
        for name, whole in wholes.items():
            for record in self.records:
                errors = [self.piece_error(piece, whole, scale) for piece in getattr(record, kind).get(name, ())]
                if errors and max(errors) > self.bar:
                    yield Difference(self.step, rung, name, max(errors), record.rank)

    def piece_error(self, piece: Piece, whole: Tensor, scale: float = 0.0) -> float:
        pair = piece.beside(whole, self.whole.batch)
        return 0.0 if pair is None else off(*pair, size(whole), scale)

    def _backward(self) -> Iterator[Difference]:
        """In the order in which backward goes; a rank may have the whole of a gradient, or a part that adds up."""
        scale = largest(self.whole.backward.values())
        self.partial = None
        latest: tuple[str, tuple[str, ...]] | None = None
        for name, whole in reversed(self.whole.backward.items()):
            found = []
            for record in self.records:
                for index in range(len(record.backward.get(name, ()))):
                    sums = [self.added_up(record, name, index, axes) for axes in SUMS]
                    pairs = [p.beside(whole, self.whole.batch) for p in sums]
                    errors = [0.0 if pair is None else off(*pair, size(whole), scale) for pair in pairs]
                    if record is self.records[0] and pairs[0] is not None:
                        fits = [axes for axes, error in zip(SUMS, errors, strict=True) if error <= self.bar]
                        latest = (name, fits[0]) if fits and fits[0] else None
                    if min(errors) > self.bar:
                        found.append(Difference(self.step, "gradients of activations", name, errors[0], record.rank))
            if found:
                yield from found
                return
            self.partial = latest

    def added_up(self, record: Record, name: str, index: int, axes: Sequence[str]) -> Piece:
        piece = record.backward[name][index]
        total = piece.tensor
        for other in by_axis(self.records, record.rank, axes):
            parts = other.backward.get(name, [])
            if other is not record and index < len(parts) and parts[index].tensor.shape == total.shape:
                total = total + parts[index].tensor
        return Piece(total, piece.slots, piece.times, piece.features)

    def _before_reduction(self) -> Iterator[Difference]:
        """Weights whose own gradients on all ranks do not add up to one device's, over any axes."""
        if self.standard.steps[self.step].skipped:
            return
        count = self.standard.steps[self.step].count
        scale = self.standard.scales.get((self.step, "gradients", ""), 0.0) * count
        for name, whole in self.standard.steps[self.step].gradients.items():
            for record in self.records:
                if whole is None or name not in record.rows:
                    continue
                part = self.part(record, name, whole) * count
                tries = (self.sum_of_own(record, name, axes) for axes in self.subsets())
                errors = [off(total, part, size(whole) * count, scale) for total in tries if total is not None]
                if errors and min(errors) > self.bar:
                    yield Difference(self.step, "gradients before reduction", name, min(errors), record.rank)

    def subsets(self) -> list[tuple[str, ...]]:
        axes = [axis for axis in self.records[0].coordinates if self.sizes.get(axis, 1) > 1]
        return [subset for n in range(len(axes) + 1) for subset in itertools.combinations(axes, n)]

    @staticmethod
    def part(record: Record, name: str, whole: Tensor) -> Tensor:
        cut, index, _, _ = record.rows[name]
        return cut.take(whole, index) if cut else whole

    def rows(self, record: Record, name: str, whole: Tensor) -> Tensor:
        return own_rows(self.part(record, name, whole), record.rows[name][2:])

    def sum_of_own(self, record: Record, name: str, axes: Sequence[str]) -> Tensor | None:
        """Over ranks that hold the same part: what their backwards made."""
        parts = [
            torch.stack(other.own[name]).sum(0)
            for other in by_axis(self.records, record.rank, axes)
            if other.own.get(name) and other.rows[name][:2] == record.rows[name][:2]
        ]
        alike = parts and all(part.shape == parts[0].shape for part in parts)
        return torch.stack(parts).sum(0) if alike else None

    def needed(self, record: Record, name: str, whole: Tensor) -> tuple[str, ...] | None:
        """The fewest axes over which own gradients add up to one device's."""
        part = self.part(record, name, whole)
        for axes in self.subsets():
            total = self.sum_of_own(record, name, axes)
            if total is not None and algebra.same(total, part):
                return axes
        return None


def largest(tensors: Iterable[Tensor]) -> float:
    """The largest norm among them that is finite: what is next to nothing beside it is rounding alone."""
    return max(filter(math.isfinite, map(size, tensors)), default=0.0)


def own_rows(part: Tensor, rows: tuple[int, int]) -> Tensor:
    """A rank's rows of the part that it computes with."""
    return part.reshape(part.shape[0] if part.ndim else 1, *part.shape[1:])[slice(*rows)]
