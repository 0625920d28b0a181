"""What ranks owe of gradients that travel in few bits, in checkpoints: nothing of it is lost under another layout.

comm/owed/<sender>/<weight>     of each sender's own gradients: a replica's, or those of a rank that shares the weight
comm/sums/<part>/<weight>       of the sums over replicas, flat, of each part that ``tp`` or ``ep`` has cut
comm/basis/<part>/<weight>      beside it, what a method of low rank multiplies each part with that is a rank's own

Where momentum is what travels, it is what is owed too: of that ``owed_momentum`` and ``sums_momentum``, which nobody
takes up who sends gradients.

As many senders as there were take up each its own. Otherwise all that was owed is added up, and every sender takes an
equal share: so does it with what was owed of sums, where there are none to owe of. Of parts that are cut otherwise what
was owed of sums is left out, and what is kept beside begins anew, which `train.changes` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from phalanx.checkpoint.manifest import Held, Manifest
from phalanx.checkpoint.read import Wanted
from phalanx.comm import Comm
from phalanx.layout import Layout
from phalanx.parallel.spread import Spread
from phalanx.parallel.weights.boxes import Box, boxes
from phalanx.parallel.weights.coded import CodedGradients
from phalanx.parallel.weights.weight import Rows, Weight

COMM = "comm/"
"""How all of it begins."""
KINDS = ("owed", "sums"), ("owed_momentum", "sums_momentum")


class OwedPart(NamedTuple):
    """A part of what this rank owes of a weight."""

    weight: str
    holders: dict[str, list[int] | None]
    """Where the ranks are that owe the same."""
    name: str
    box: Box
    shape: tuple[int, ...]
    value: Tensor


class OwedState:
    """All that a rank owes."""

    def __init__(self, spread: Spread) -> None:
        self.spread, self.holding, self.mesh = spread, spread.holding, spread.mesh
        self.coded = [bucket.coded for bucket in spread.buckets if bucket.coded is not None]
        method = Comm.parse(spread.layout.comm)
        self._owed, self._sums = KINDS[method is not None and method.name == "onebit"]

    def parts(self) -> Iterator[OwedPart]:
        """What is to be saved."""
        for coded in self.coded:
            if coded.owed is not None and coded.owed.begun:
                for weight, box, view in self._pieces(coded, coded.owed.now):
                    shape = tuple(self.holding.shapes[weight.name])
                    name = f"comm/{self._owed}/{self._sender(coded)}/{weight.name}"
                    yield OwedPart(weight.name, self._holders(weight), name, box, shape, view)
            if coded.owed_of_sums is not None and coded.owed_of_sums.begun:
                for weight, first, run in coded.runs(coded.owed_of_sums.now, self.mesh.index("dp")):
                    box, shape = Box((first,), (len(run),)), (weight.shape.numel(),)
                    yield OwedPart(weight.name, self._holders(weight), self._sums_name(weight), box, shape, run)

            for weight in coded.weights if coded.bases else ():
                kept, name = coded.bases[weight.name].now, self._basis_name(coded, weight)
                holders = self._holders(weight) | {"dp": None}
                yield OwedPart(weight.name, holders, name, Box.whole(kept), tuple(kept.shape), kept)

    def _holders(self, weight: Weight) -> dict[str, list[int] | None]:
        return {"pp": self.holding.stage_ranks(weight.name), "tp": self.holding.alike(weight.name)}

    def want(self, manifest: Manifest, found: Wanted) -> None:
        """Where each saved tensor goes on this rank. What was owed here is not any more."""
        owners = {_owner(name, kind) for name in manifest.tensors for kind in (self._owed, self._sums)} - {None}
        then = _senders_then(manifest) if owners else 0
        for coded in self.coded:
            coded.forget()
            if coded.owed is not None and any(weight.name in owners for weight in coded.weights):
                self._want(coded, coded.owed.now, then, manifest.tensors, found)
            for weight in coded.weights if coded.bases else ():
                kept, name = coded.bases[weight.name].now, self._basis_name(coded, weight)
                if name in manifest.tensors and manifest.tensors[name].shape == tuple(kept.shape):
                    found[name] = [(Box.whole(kept), kept)]

    def _want(self, coded: CodedGradients, owed: Tensor, then: int, saved: Mapping[str, Held], found: Wanted) -> None:
        """``then``: so many ranks owed."""
        now = self.mesh.size("dp") if not coded.over_shards else coded.storage.ranks
        senders = [self._sender(coded)] if then == now else range(then)
        for weight, box, view in self._pieces(coded, owed if then == now else coded.taken_up()):
            for sender in senders:
                name = f"comm/{self._owed}/{sender}/{weight.name}"
                if name in saved:
                    found.setdefault(name, []).append((box, view))
                    if then != now:
                        found.joins[name] = Tensor.add_
        self._want_sums(coded, saved, found)

    def _want_sums(self, coded: CodedGradients, saved: Mapping[str, Held], found: Wanted) -> None:
        """Of parts that this rank has too, where it makes sums; else of weights that are whole in both."""
        if coded.owed_of_sums is not None:
            for weight, first, run in coded.runs(coded.owed_of_sums.now, self.mesh.index("dp")):
                name = self._sums_name(weight)
                if name in saved and saved[name].shape == (weight.shape.numel(),):
                    found.setdefault(name, []).append((Box((first,), (len(run),)), run))
            return
        for weight, rows, view in coded.pieces(coded.taken_up()):
            name, size = self._sums_name(weight), weight.shape.numel()
            if name in saved and saved[name].shape == (size,) and view.numel():
                box = Box((rows.first * weight.row_size,), (view.numel(),))
                found.setdefault(name, []).append((box, view.view(-1)))
                found.joins[name] = Tensor.add_

    def _pieces(self, coded: CodedGradients, owed: Tensor) -> Iterator[tuple[Weight, Box, Tensor]]:
        for weight, rows, view in coded.pieces(owed):
            for box, part in self._boxes(weight, rows, view):
                yield weight, box, part

    def _boxes(self, weight: Weight, rows: Rows, view: Tensor) -> list[tuple[Box, Tensor]]:
        cut = self.holding.cut(weight.name)
        return boxes(rows, cut, self.holding.index(weight.name) if cut else 0, view)

    def _sender(self, coded: CodedGradients) -> int:
        return coded.storage.rank if coded.over_shards else self.mesh.index("dp")

    def _basis_name(self, coded: CodedGradients, weight: Weight) -> str:
        cut = self.holding.index(weight.name) if self.holding.cut(weight.name) else 0
        return f"comm/basis/{cut}.{coded.storage.rank}of{coded.storage.ranks}/{weight.name}"

    def _sums_name(self, weight: Weight) -> str:
        cut = self.holding.cut(weight.name)
        return f"comm/{self._sums}/{self.holding.index(weight.name) if cut else 0}/{weight.name}"


def _senders_then(manifest: Manifest) -> int:
    """How many ranks owed when it was saved, also where not all that they owed is there, as in one host's memory."""
    then = Layout.parse(manifest.facts["layout"])
    return int(getattr(then, then.coded_axis))


def _owner(name: str, kind: str) -> str | None:
    """The weight that a saved tensor is owed of."""
    words = name.split("/", 3)
    return words[3] if len(words) == 4 and words[:2] == ["comm", kind] else None


def fits(name: str, shape: tuple[int, ...], saved: Mapping[str, Held]) -> bool:
    """Whether a saved tensor has a shape in which something can be owed."""
    owed, sums = (
        next(filter(None, (_owner(name, kind) for kind in kinds)), None) for kinds in zip(*KINDS, strict=True)
    )
    basis = _owner(name, "basis")
    if owed:
        return owed in saved and saved[owed].shape == shape
    return (sums in saved and len(shape) == 1) if sums else (basis in saved and len(shape) == 2)
