"""``comm=powersgd:R`` on one device: of the sum of all gradients, with what is owed, its projection on few columns.

What senders owe is linear in what they have, so that one device owes what all of them do together.
"""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor, nn, optim

from phalanx.layout import Layout
from phalanx.parallel.communication.codecs.low_rank import first_basis
from phalanx.parallel.weights.placement import Placement
from phalanx.prove.reference.coded import Coded, State, parts


class Projected(Coded):
    """The sums of a layout."""

    def __init__(self, layout: Layout, placement: Placement, batch: int, steps: int) -> None:
        super().__init__(layout, placement, batch, steps)
        self.rank = int(self.number)
        self.matrices = {name: list(self._shapes(name, placement)) for name in self.pieces}
        """By weight, rows and columns of each of its pieces; none where all of it is sent as it is."""
        self.bases: dict[tuple[str, int], Tensor] = {}
        self._turned: dict[tuple[str, int], Tensor] = {}

    def _shapes(self, name: str, placement: Placement) -> list[tuple[int, int]]:
        found = []
        for part, ranks in parts(name, placement):
            if part.ndim < 2:
                return []
            most, columns = -(-part.shape[0] // ranks), part[0].numel()
            if self.rank * (most + columns) >= most * columns:
                return []
            found += [(max(0, min(most, part.shape[0] - rank * most)), columns) for rank in range(ranks)]
        return found

    def begin(self, step: int, optimizer: optim.Optimizer, trained: dict[str, nn.Parameter]) -> None:
        self.step = step

    def sum(self, gradients: list[State]) -> State:
        found = {name: torch.stack([own[name] for own in gradients]).sum(0) for name in gradients[0]}
        for name, total in found.items():
            if self.step >= self.begins and name not in self.exact and self.matrices[name]:
                total += self.owed.get((name, 0), torch.zeros_like(total))
                said = torch.empty_like(total)
                for number, (indices, shape) in enumerate(zip(self.pieces[name], self.matrices[name], strict=True)):
                    piece = total.flatten()[indices].view(shape)
                    said.view(-1)[indices] = self._projected((name, number), piece).flatten()
                self.next_owed[name, 0] = total - said
                found[name] = said
        return found

    def _projected(self, key: tuple[str, int], matrix: Tensor) -> Tensor:
        """A matrix on the columns that come of what is kept of it."""
        first = first_basis(key[0], matrix.shape[1], self.rank).to(matrix.device)
        kept = self.bases.get(key, torch.zeros_like(first))
        columns: list[Tensor] = []
        for number in range(self.rank):
            own = kept[:, number] / kept[:, number].norm() if kept[:, number].any() else first[:, number]
            column = whole = matrix @ own
            for before in columns * 2:
                column = column - before * (before @ column)
            nothing = column.norm() <= torch.finfo(matrix.dtype).eps ** 0.5 * whole.norm()
            columns.append(torch.zeros_like(column) if nothing else column / column.norm())
        basis = torch.stack(columns, 1)
        self._turned[key] = matrix.T @ basis
        return basis @ self._turned[key].T

    def end_step(self, counts: bool, without: Set[str]) -> None:
        super().end_step(counts, without)
        self.bases |= {key: value for key, value in self._turned.items() if counts and key[0] not in without}
        self._turned = {}
