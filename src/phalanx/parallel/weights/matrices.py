"""Whole matrices for optimizers that need them: which rank updates which weight, and how its parts travel.

Every weight has one owner among the ranks that share one copy of the model's stage (``fsdp x cp x tp``). Before an
update, all parts of its gradient and of the weight travel to the owner; after it, updated rows travel back: one
all-to-all each way, for all weights together. The optimizer's state lies whole at the owner and nowhere else.

The whole weight is there for the update alone. Rows stay the one truth that is gathered, saved and restored, and no
rank keeps another copy of them; what that costs is the bytes of one more all-to-all a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.layout import Layout
from phalanx.parallel.axes.cuts import Cut
from phalanx.parallel.communication.mesh import Grid
from phalanx.parallel.weights.boxes import boxes
from phalanx.parallel.weights.holding import Holding
from phalanx.parallel.weights.placement import Placed
from phalanx.parallel.weights.weight import Rows, Weight

COPY = ("fsdp", "cp", "tp")
"""The axes over which one copy of a stage's weights is divided."""
Outgoing = defaultdict[int, list[Tensor]]
"""What goes to each member."""


def cost(shape: torch.Size) -> int:
    """About what an update of a whole matrix takes: a few products with itself."""
    rows = shape[0] if shape else 1
    return shape.numel() * min(rows, shape.numel() // rows) if rows else 0


def owners(shapes: Mapping[str, torch.Size], stages: Mapping[str, Sequence[int]], members: int) -> dict[str, int]:
    """Who updates each weight: the longest first, each to whoever has the least to do on the stages that hold it.

    The same on all ranks; a weight that several stages hold has the same owner on each.
    """
    loads: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(members))
    found = {}
    for name in sorted(shapes, key=lambda name: (-cost(shapes[name]), name)):
        held = [loads[stage] for stage in stages[name]]
        found[name] = int(np.maximum.reduce(held).argmin())
        for load in held:
            load[found[name]] += cost(shapes[name]) + 1
    return found


@dataclass(frozen=True)
class MatrixPart:
    """Rows of a weight that some members hold alike."""

    rows: Rows
    cut: Cut | None
    index: int
    """Along the cut's axis."""

    @classmethod
    def of(cls, one: Placed, grid: Grid) -> MatrixPart:
        """What a rank holds of a weight."""
        return cls(one.rows(grid), one.cut, one.index(grid))

    @cached_property
    def numel(self) -> int:
        return self.rows.size.numel()

    def put(self, flat: Tensor, whole: Tensor) -> None:
        """Lay the part where it belongs."""
        for box, view in boxes(self.rows, self.cut, self.index, flat.view(self.rows.size)):
            box.of(whole).copy_(view)

    def take(self, whole: Tensor) -> Tensor:
        """The part, flat."""
        part = whole.new_empty(self.rows.size)
        for box, view in boxes(self.rows, self.cut, self.index, part):
            view.copy_(box.of(whole))
        return part.view(-1)


def holders_of(one: Placed, grid: Grid) -> list[int]:
    """The members that hold the same of a weight as a rank, which is among them."""
    first = grid.index(*COPY) - grid.index("tp")  # ``tp``'s are neighbours
    return [first + other for other in one.alike(grid)]


def distinct(one: Placed, members: Sequence[Grid]) -> Iterator[tuple[MatrixPart, list[int]]]:
    """All parts of a weight, each with the members that hold it."""
    for member, grid in enumerate(members):
        alike = holders_of(one, grid)
        if alike[0] == member:
            yield MatrixPart.of(one, grid), alike


class Matrix:
    """A weight that is updated whole."""

    def __init__(self, weight: Weight, one: Placed, members: Sequence[Grid], member: int, owner: int) -> None:
        """``member``: which of those that share a copy of the stage's weights this rank is."""
        self.weight, self.shape, self.owner, self.here = weight, one.shape, owner, owner == member
        self.own = MatrixPart.of(one, members[member])
        self.sends = self._source(holders_of(one, members[member])) == member
        weight.state_here = self.here
        self.blank = weight.optimized.data
        """Of the whole shape, without memory."""
        every = distinct(one, members) if self.here else ()
        self.parts = [(part, self._source(holders), holders) for part, holders in every if part.numel]
        """At the owner: all parts, who sends each, and who holds it."""

    def _source(self, holders: Sequence[int]) -> int:
        """Of those who hold a part, the member that sends it: the owner itself, or one of them."""
        return self.owner if self.owner in holders else holders[self.owner % len(holders)]

    @property
    def gradient(self) -> Tensor:
        """Of the rows that this rank owns."""
        assert self.weight.shard.grad is not None
        return self.weight.shard.grad

    def room(self) -> Tensor:
        """Memory for the whole, where its rows are; each begins at a boundary of its own."""
        return torch.empty_like(self.weight.optimized, memory_format=torch.contiguous_format, requires_grad=False)

    def lend(self, weight: Tensor, gradient: Tensor) -> None:
        """Have the optimizer see the whole."""
        self.weight.optimized.data = weight
        self.weight.optimized.grad = gradient

    def take_back(self) -> Tensor:
        """The whole, which the optimizer sees no more."""
        whole, self.weight.optimized.data, self.weight.optimized.grad = self.weight.optimized.data, self.blank, None
        return whole.view(self.shape)


class Matrices:
    """The weights of this rank's stage that are updated whole, each by its owner."""

    def __init__(
        self, weights: Sequence[Weight], holding: Holding, layout: Layout, owner: Mapping[str, int], like: Tensor
    ) -> None:
        """``owner``: of each weight, the member. ``like``: of what travels. All ranks must make it together."""
        mesh, placed = holding.mesh, holding.placement.weights
        members = [Grid(layout, rank) for rank in mesh.members(COPY)]
        self.group, self.member = mesh.joint(*COPY), mesh.index(*COPY)
        self._empty = like.new_empty(0)
        self.copies = bool(layout.exact)
        """Of gradients, also where nothing travels: bits of a product may hang on where in memory a factor begins."""
        self.all = [Matrix(weight, placed[weight.name], members, self.member, owner[weight.name]) for weight in weights]
        self._by_parameter = {matrix.weight.optimized: matrix for matrix in self.all}
        self._lent: list[Matrix] = []

    def given(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter of the optimizer has a gradient, here or at the weight's owner."""
        matrix = self._by_parameter.get(parameter)
        return (parameter if matrix is None else matrix.weight.shard).grad is not None

    def _updated(self) -> list[Matrix]:
        """Those that have a gradient in this step, the same on all members."""
        return [matrix for matrix in self.all if matrix.weight.shard.grad is not None]

    @torch.no_grad()
    def gather(self) -> None:
        """Before an update: the optimizer is given, of what this rank owns, whole weights and gradients."""
        updated = self._updated()
        self._lent = [matrix for matrix in updated if matrix.here]
        if self.group.alone:
            for matrix in self._lent:
                matrix.lend(matrix.weight.shard.data, matrix.gradient.clone() if self.copies else matrix.gradient)
            return
        outgoing: Outgoing = defaultdict(list)
        for matrix in updated:
            if matrix.sends:
                outgoing[matrix.owner] += [matrix.gradient, matrix.weight.shard.data]
        sizes = [0] * self.group.size
        for matrix in self._lent:
            for part, source, _ in matrix.parts:
                sizes[source] += 2 * part.numel
        received = self._exchanged(outgoing, sizes)
        for matrix in self._lent:
            gradient, whole = matrix.room(), matrix.room()
            for part, source, _ in matrix.parts:
                for target in (gradient, whole):
                    part.put(received[source].take(part.numel), target.view(matrix.shape))
            matrix.lend(whole, gradient)

    @torch.no_grad()
    def scatter(self) -> None:
        """After an update: each rank gets its rows of what others have updated, and the whole is let go."""
        wholes = [(matrix, matrix.take_back()) for matrix in self._lent]
        self._lent = []
        if self.group.alone:
            return
        outgoing: Outgoing = defaultdict(list)
        for matrix, whole in wholes:
            for part, _, holders in matrix.parts:
                rows = part.take(whole)
                for holder in holders:
                    outgoing[holder].append(rows)
        updated, sizes = self._updated(), [0] * self.group.size
        for matrix in updated:
            sizes[matrix.owner] += matrix.own.numel
        received = self._exchanged(outgoing, sizes)
        for matrix in updated:
            shard = matrix.weight.shard.data
            shard.copy_(received[matrix.owner].take(matrix.own.numel).view(shard.shape))

    def _exchanged(self, outgoing: Outgoing, sizes: list[int]) -> list[Flat]:
        """The tensors of list r go to member r, and so many numbers come from it."""
        lists = [outgoing[member] for member in range(self.group.size)]
        own = torch.cat([self._empty, *(tensor.reshape(-1).to(self._empty) for tensors in lists for tensor in tensors)])
        counts = [sum(tensor.numel() for tensor in tensors) for tensors in lists]
        return [Flat(part) for part in self.group.all_to_all_rows(own, counts, sizes).split(sizes)]


class Flat:
    """Tensors one after another, taken in turn."""

    def __init__(self, tensor: Tensor) -> None:
        self._rest = tensor

    def take(self, size: int) -> Tensor:
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken
