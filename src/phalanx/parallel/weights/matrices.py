"""Whole matrices for optimizers that need them: which rank updates which weight, and how its parts travel.

Every weight has one owner among the ranks that share one copy of the model's stage (``fsdp x cp x tp``). Before an
update, all parts of its gradient and of the weight travel to the owner; after it, updated rows travel back: one
all-to-all each way, for all weights together. The optimizer's state lies whole at the owner and nowhere else.

The whole weight is there for the update alone. Rows stay the one truth that is gathered, saved and restored, and no
rank keeps another copy of them; what that costs is the bytes of one more all-to-all a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx.layout import Layout
from phalanx.parallel.axes.cuts import Cut
from phalanx.parallel.communication import collectives
from phalanx.parallel.communication.mesh import EXPERT_SHARD, SHARD, Grid
from phalanx.parallel.weights.boxes import boxes
from phalanx.parallel.weights.bucket import Rows, Weight
from phalanx.parallel.weights.holding import Holding

COPY = ("fsdp", "cp", "tp")
"""The axes over which one copy of a stage's weights is divided."""


def cost(shape: torch.Size) -> int:
    """About what an update of a whole matrix takes: a few products with itself."""
    rows = shape[0] if shape else 1
    return shape.numel() * min(rows, shape.numel() // rows) if rows else 0


def owners(shapes: Mapping[str, torch.Size], stages: Mapping[str, Sequence[int]], members: int) -> dict[str, int]:
    """Who updates each weight: the longest first, each to whoever has the least to do on the stages that hold it.

    The same on all ranks; a weight that several stages hold has the same owner on each.
    """
    loads: dict[int, list[int]] = defaultdict(lambda: [0] * members)
    found = {}
    for name in sorted(shapes, key=lambda name: (-cost(shapes[name]), name)):
        held = [loads[stage] for stage in stages[name]]
        found[name] = min(range(members), key=lambda member: max(load[member] for load in held))
        for load in held:
            load[found[name]] += cost(shapes[name]) + 1
    return found


@dataclass(frozen=True)
class Part:
    """Rows of a weight that some members of the group hold alike."""

    rows: Rows
    cut: Cut | None
    index: int
    """Along the cut's axis."""
    holders: tuple[int, ...]

    @property
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


def parts(shape: torch.Size, cut: Cut | None, grids: Sequence[Grid]) -> list[Part]:
    """The parts of a weight, and who of the members that stand at ``grids`` holds them."""
    axes = EXPERT_SHARD if cut is not None and cut.axis == "ep" else SHARD
    found: dict[object, tuple[Rows, int, list[int]]] = {}
    for member, grid in enumerate(grids):
        index = grid.index(cut.axis) if cut else 0
        rows = Rows.of(cut.shape(shape, index) if cut else shape, grid.size(*axes), grid.index(*axes))
        key = cut.spans[index] if cut else None, rows
        found.setdefault(key, (rows, index, []))[2].append(member)
    return [Part(rows, cut, index, tuple(holders)) for rows, index, holders in found.values()]


class Matrix:
    """A weight that is updated whole."""

    def __init__(self, weight: Weight, shape: torch.Size, parts: Sequence[Part], owner: int, member: int) -> None:
        """``member``: this rank's place among those that hold the ``parts``."""
        self.weight, self.shape, self.parts, self.owner = weight, shape, parts, owner
        self.own = next(part for part in parts if member in part.holders)
        self.here = owner == member
        weight.state_here = self.here
        self.blank = weight.optimized.data
        """Of the whole shape, without memory."""

    def source(self, part: Part) -> int:
        """Of those who hold a part, the member that sends it: the owner itself, or one of them."""
        return self.owner if self.owner in part.holders else part.holders[self.owner % len(part.holders)]

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

    def __init__(self, weights: Sequence[Weight], holding: Holding, layout: Layout, owner: Mapping[str, int]) -> None:
        """``owner``: of each weight, the member of the group. All ranks of the group must make it together."""
        mesh = holding.mesh
        self.group, self.member = mesh.joint(*COPY), mesh.index(*COPY)
        self.copies = bool(layout.exact)
        """Of gradients, also where nothing travels: bits of a product may hang on where in memory a factor begins."""
        grids = [Grid(layout, rank) for rank in mesh.members(COPY)]
        self.all = [
            Matrix(
                weight,
                holding.shapes[weight.name],
                parts(holding.shapes[weight.name], holding.cut(weight.name), grids),
                owner[weight.name],
                self.member,
            )
            for weight in weights
        ]
        self._by_parameter = {matrix.weight.optimized: matrix for matrix in self.all}
        self._lent: list[Matrix] = []

    def given(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter of the optimizer has a gradient, here or at the weight's owner."""
        matrix = self._by_parameter.get(parameter)
        return (parameter if matrix is None else matrix.weight.piece).grad is not None

    def _updated(self) -> list[Matrix]:
        """Those that have a gradient in this step, the same on all members."""
        return [matrix for matrix in self.all if matrix.weight.piece.grad is not None]

    @torch.no_grad()
    def gather(self) -> None:
        """Before an update: the optimizer is given, of what this rank owns, whole weights and gradients."""
        self._lent = [matrix for matrix in self._updated() if matrix.here]
        if self.group is None:
            for matrix in self._lent:
                gradient = matrix.weight.piece.grad
                assert gradient is not None
                matrix.lend(matrix.weight.piece.data, gradient.clone() if self.copies else gradient)
            return
        outgoing: list[list[Tensor]] = [[] for _ in range(self.group.size())]
        for matrix in self._updated():
            if matrix.source(matrix.own) == self.member:
                gradient = matrix.weight.piece.grad
                assert gradient is not None
                outgoing[matrix.owner] += [gradient, matrix.weight.piece.data]
        sizes = [0] * self.group.size()
        for matrix in self._lent:
            for part in matrix.parts:
                sizes[matrix.source(part)] += 2 * part.numel
        received = self._exchanged(outgoing, sizes)
        for matrix in self._lent:
            gradient, whole = matrix.room(), matrix.room()
            for part in matrix.parts:
                for target in (gradient, whole):
                    part.put(received[matrix.source(part)].take(part.numel), target.view(matrix.shape))
            matrix.lend(whole, gradient)

    @torch.no_grad()
    def scatter(self) -> None:
        """After an update: each rank gets its rows of what others have updated, and the whole is let go."""
        wholes = [(matrix, matrix.take_back()) for matrix in self._lent]
        self._lent = []
        if self.group is None:
            return
        outgoing: list[list[Tensor]] = [[] for _ in range(self.group.size())]
        for matrix, whole in wholes:
            for part in matrix.parts:
                rows = part.take(whole)
                for holder in part.holders:
                    outgoing[holder].append(rows)
        sizes = [0] * self.group.size()
        for matrix in self._updated():
            sizes[matrix.owner] += matrix.own.numel
        received = self._exchanged(outgoing, sizes)
        for matrix in self._updated():
            piece = matrix.weight.piece.data
            piece.copy_(received[matrix.owner].take(matrix.own.numel).view(piece.shape))

    def _exchanged(self, outgoing: Sequence[Sequence[Tensor]], sizes: Sequence[int]) -> list[Flat]:
        """The tensors of list r go to member r, and so many numbers come from it."""
        assert self.group is not None
        storage = self.all[0].weight.storage
        empty = torch.empty(0, dtype=storage.parameter, device=storage.device)
        own = torch.cat([empty, *(t.reshape(-1).to(empty) for tensors in outgoing for t in tensors)])
        counts = [sum(tensor.numel() for tensor in tensors) for tensors in outgoing]
        return [Flat(part) for part in collectives.exchange_rows(own, counts, sizes, self.group).split(list(sizes))]


class Flat:
    """Tensors one after another, taken in turn."""

    def __init__(self, tensor: Tensor) -> None:
        self._rest = tensor

    def take(self, size: int) -> Tensor:
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken
