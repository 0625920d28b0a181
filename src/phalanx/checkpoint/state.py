"""A rank's training state, piece by piece under layout-free names, and who keeps what several ranks hold alike.

model/<weight or buffer>        its value
optimizer/<key>/<weight>        what the optimizer keeps for each element; or of the whole weight, in a shape of its own
counters/<key>/<weight>         what it keeps once for a weight, as how many updates it has had
callbacks/<name>/<weight>       what a callback keeps for each element, as an average
comm/...                        what is owed of gradients (`owed`)
outer/velocity/<weight>         what the outer optimizer carries on, where sites train by themselves
sites/<number>/...              what each of them has of its own: the optimizer's, and weights where they differ
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, optim

from phalanx.checkpoint.keepable import check_keepable, check_names, check_owners, check_shape
from phalanx.checkpoint.manifest import Held, Manifest
from phalanx.checkpoint.owed import OwedState
from phalanx.checkpoint.read import Wanted
from phalanx.checkpoint.sites import SITES, UNTOLD, VELOCITY, MeanOfSites, Taken
from phalanx.parallel.communication.mesh import AXES
from phalanx.parallel.spread import Spread
from phalanx.parallel.weights.boxes import Box, boxes
from phalanx.parallel.weights.weight import Weight

ALL = None


@dataclass(frozen=True)
class Entry:
    """A part of a tensor that this rank holds."""

    name: str
    box: Box
    shape: tuple[int, ...]
    value: Tensor
    """The live tensor: it changes with the next update."""
    kept: bool = True
    """This rank keeps it in its host's memory; of those on one host that hold the same, one does."""
    written: bool = True
    """This rank writes it to files; of all that hold the same, one does."""
    restless: bool = False
    """It may change in a forward already, as a batch-norm's averages do."""


class State:
    """What must be saved of a rank for training to go on as if nothing had happened."""

    def __init__(
        self,
        spread: Spread,
        optimizer: optim.Optimizer,
        hosts: Sequence[int] | None = None,
        beside: Mapping[str, dict[str, Tensor]] | None = None,
        left_out: Set[str] = frozenset(),
    ) -> None:
        """``hosts``: on which host each rank is; by default all are on one.

        ``beside``: by callback and weight, tensors in the shape of the weight's shard. ``left_out``: weights that are
        not saved, since they can be had where they came from (`checkpoint.frozen`).
        """
        self.beside, self.left_out = beside or {}, left_out
        self.spread, self.optimizer = spread, optimizer
        self.mesh, self.holding, self.outer = spread.mesh.everybody, spread.holding, spread.outer
        self.own = f"{SITES}{self.mesh.index('dp')}/" if self.outer is not None else ""
        """Before the names of what this site has of its own."""
        self.hosts = hosts or [0] * self.mesh.size(*AXES)
        self._turns: dict[int, dict[str, int]] = {}
        self._roles: dict[tuple[str, bool, bool], tuple[bool, bool]] = {}
        self._among: dict[tuple[Any, ...], tuple[list[int], list[int]]] = {}

    def entries(self) -> Iterator[Entry]:
        """All that this rank holds."""
        check_owners(self.optimizer, [weight.optimized for weight in self.spread.weights.values()])
        replicated = self._replicated()
        for label, tensors in self.beside.items():
            check_names(label, tensors, {*self.spread.weights, *(name for name, _ in self.spread.whole.replicated())})
        for name, weight in self.spread.weights.items():
            if name not in self.left_out:
                yield from self._values(name, weight)
            for key, value in self._moments(weight):
                if isinstance(value, Tensor):
                    yield from self._kept(weight, key, value)
                else:
                    check_keepable(self.optimizer, name, weight.shard, key, value)
            for label, tensors in self.beside.items():
                if name in tensors and self.holding.shapes[name].numel():
                    check_shape(label, name, tensors[name], weight.shard)
                    yield from self._parts(f"callbacks/{label}/{name}", weight, tensors[name])
        for part in OwedState(self.spread).parts():
            yield Entry(*part[2:], *self._kept_here(part.weight, part.holders))
        for name, tensor in replicated:
            places = {"pp": self.holding.stage_ranks(name), "dp": ALL, "fsdp": ALL, "cp": ALL, "tp": ALL}
            role = self._kept_here(name, places)
            box, shape = Box.whole(tensor), tuple(tensor.shape)
            yield Entry(f"model/{name}", box, shape, tensor.detach(), *role, restless=True)
            for label, tensors in self.beside.items():
                if name in tensors:
                    check_shape(label, name, tensors[name], tensor)
                    yield Entry(f"callbacks/{label}/{name}", box, shape, tensors[name], *role)

    def values(self, names: Iterable[str]) -> Iterator[Entry]:
        """This rank's parts of some weights, each part on one rank alone."""
        here = [weight for name in names if (weight := self.spread.weights.get(name)) is not None]
        entries = (entry for weight in here for entry in self._parts(weight.name, weight, weight.shard.data))
        return (entry for entry in entries if entry.written)

    def _values(self, name: str, weight: Weight) -> Iterator[Entry]:
        """A weight's value; with sites the one that they agreed on, their own if they have others, and the outer's."""
        outer, own = self.outer, weight.shard.data
        agreed = own if outer is None or not outer.local.apart else outer.agreed.get(name, own)
        yield from self._parts(f"model/{name}", weight, agreed, restless=weight.written)
        if agreed is not own:
            yield from self._parts(f"{self.own}model/{name}", weight, own)
        if outer is not None and name in outer.velocity:
            yield from self._parts(f"{VELOCITY}{name}", weight, outer.velocity[name])

    def _kept(self, weight: Weight, key: str, value: Tensor) -> list[Entry]:
        """A tensor that the optimizer keeps of a weight."""
        name = f"{self.own}optimizer/{key}/{weight.name}"
        if value.shape == weight.shard.shape and weight.optimized is weight.shard:
            return self._parts(name, weight, value)
        if value.numel() == 1 and not (weight.whole_state and value.ndim):
            if not self._speaks(weight):
                return []
            kept, written = self._role(weight, every_part=True, own=True)
            return [Entry(f"{self.own}counters/{key}/{weight.name}", Box((), ()), (), value.view(()), kept, written)]
        if not weight.whole_state:
            check_keepable(self.optimizer, weight.name, weight.shard, key, value)
            return []
        if value.shape == weight.optimized.shape:
            value = value.view(self.holding.shapes[weight.name])
        kept, written = self._role(weight, every_part=True, own=True)
        return [Entry(name, Box.whole(value), tuple(value.shape), value, kept, written)]

    def numbers(self) -> dict[str, Any]:
        """What the optimizer keeps that is no tensor, and what a site has yet to tell others."""
        untold = {} if self.outer is None else {f"{self.own}{UNTOLD}": self.outer.untold}
        return untold | {
            f"{self.own}counters/{key}/{name}": value
            for name, weight in self.spread.weights.items()
            if self._speaks(weight)
            for key, value in self._moments(weight)
            if not isinstance(value, Tensor)
        }

    def wanted(self, manifest: Manifest) -> Wanted:
        """Where each saved tensor goes on this rank; makes room for the optimizer's and the callbacks'."""
        taken, found = Taken.of(manifest, self.own, self.mesh.size("dp")), Wanted()
        keys = taken.kept(manifest)
        self.optimizer.state.clear()
        self.spread.reduction.unsettled.clear()
        self._want_beside(manifest, found)
        OwedState(self.spread).want(manifest, found)
        self._want_of_sites(manifest, taken, found)
        for name, weight in self.spread.weights.items():
            if f"model/{name}" in manifest.tensors:
                found.setdefault(f"model/{name}", self._boxes(weight, weight.shard.data))
            for (kind, key), names in keys.get(name, {}).items() if weight.trainable and weight.state_here else ():
                state = self.optimizer.state[weight.optimized]
                state[key] = self._want_kept(manifest, weight, names, kind == "counters", found)
        for name, tensor in self._replicated():
            found[f"model/{name}"] = [(Box.whole(tensor), tensor.detach())]
        for name in [name for name, parts in found.items() if not parts]:
            del found[name]
        return found

    def _want_kept(
        self, manifest: Manifest, weight: Weight, names: Sequence[str], counters: bool, found: Wanted
    ) -> Any:
        """What the optimizer is to keep of a weight: by several names, what several sites kept."""
        if numbers := [manifest.numbers[name] for name in names if name in manifest.numbers]:
            return numbers[-1]
        held = manifest.tensors[names[0]]
        if counters:
            room = self._number_room(weight, held)
            self._want_joined(names, room, lambda total: [(Box((), ()), total)], found, counters=True)
            return room
        room = self._room(weight, held)
        if room.dtype == torch.uint8:  # codes have no mean: the first site's
            names = names[:1]
        self._want_joined(names, room, lambda total: list(self._places(weight, total)), found)
        return room

    def _want_joined(
        self, names: Sequence[str], room: Tensor, places: Callable[[Tensor], list[tuple[Box, Tensor]]], found: Wanted,
        counters: bool = False,
    ) -> None:  # fmt: skip
        """Have one saved tensor come into a room, or what becomes of several."""
        if len(names) == 1:
            found[names[0]] = places(room)
            return
        joined = MeanOfSites(room, len(names), counters)
        self.spread.reduction.unsettled.append(joined.settle)
        for name in names:
            found[name], found.joins[name] = places(joined.total), joined.join

    def _want_of_sites(self, manifest: Manifest, taken: Taken, found: Wanted) -> None:
        """Likewise, of what sites have agreed on, and of their own weights, where these are others."""
        outer, unsettled = self.outer, self.spread.reduction.unsettled
        if outer is not None:
            outer.untold = taken.untold(manifest, self._sites_here())
        apart = outer is not None and outer.local.apart
        for name, weight in self.spread.weights.items():
            full, goes_on = f"model/{name}", False
            if outer is not None and name in outer.velocity:
                outer.velocity[name].zero_()
                if f"{VELOCITY}{name}" in manifest.tensors:
                    found[f"{VELOCITY}{name}"] = self._boxes(weight, outer.velocity[name])
            if names := [own for each in taken.weights(apart) if (own := f"{each}{full}") in manifest.tensors]:
                self._want_joined(names, weight.shard.data, partial(self._boxes, weight), found)
                goes_on = bool(taken.own) and apart
                found[full] = []  # where sites do not go on as themselves, the mean of theirs is what all agree on
            if outer is not None and name in outer.agreed:
                if goes_on:
                    found[full] = self._boxes(weight, outer.agreed[name])
                else:
                    unsettled.append(partial(outer.settle, name))

    def _sites_here(self) -> int:
        """How many sites have ranks on this rank's host."""
        each = self.mesh.size(*AXES) // self.mesh.size("dp")
        return len({rank // each for rank, host in enumerate(self.hosts) if host == self.hosts[self.mesh.rank]})

    def _want_beside(self, manifest: Manifest, found: Wanted) -> None:
        """Likewise, of what callbacks keep."""
        for label, tensors in self.beside.items():
            tensors.clear()
            for name, weight in self.spread.weights.items():
                full = f"callbacks/{label}/{name}"
                if full in manifest.tensors:
                    dtype = getattr(torch, manifest.tensors[full].dtype)
                    tensors[name] = torch.zeros_like(weight.shard.data, dtype=dtype)
                    found[full] = self._boxes(weight, tensors[name])
            for name, tensor in self._replicated():
                if (full := f"callbacks/{label}/{name}") in manifest.tensors:
                    tensors[name] = torch.zeros_like(tensor)
                    found[full] = [(Box.whole(tensor), tensors[name])]

    def _replicated(self) -> list[tuple[str, Tensor]]:
        """What this rank has whole: buffers, and parameters that are no weights."""
        return [(n, t) for n, t in self.spread.whole.replicated() if self.holding.here(n) and t.numel()]

    def _room(self, weight: Weight, held: Held) -> Tensor:
        """For a rank's rows of what is saved; for all of it, if this rank has it whole or it has a shape of its own."""
        shape = torch.Size(held.shape)
        if shape == self.holding.shapes[weight.name]:
            shape = weight.optimized.shape
        return torch.zeros(shape, dtype=getattr(torch, held.dtype), device=weight.shard.device)

    def _places(self, weight: Weight, room: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """Where what an optimizer keeps of a weight lies in what is saved of it."""
        if room.shape == weight.shard.shape and weight.optimized is weight.shard:
            yield from self._boxes(weight, room)
        else:
            whole = room.view(self.holding.shapes[weight.name]) if room.shape == weight.optimized.shape else room
            yield Box.whole(whole), whole

    def _number_room(self, weight: Weight, held: Held) -> Tensor:
        group = next(g for g in self.optimizer.param_groups if any(p is weight.optimized for p in g["params"]))
        beside = group.get("fused") or group.get("capturable")  # torch wants such a counter where the weight is
        device = weight.shard.device if beside else "cpu"
        return torch.zeros((), dtype=getattr(torch, held.dtype), device=device)

    def _moments(self, weight: Weight) -> list[tuple[str, Any]]:
        if not weight.trainable or not weight.state_here or not self.holding.shapes[weight.name].numel():
            return []
        return list(self.optimizer.state.get(weight.optimized, {}).items())

    def _boxes(self, weight: Weight, shard: Tensor) -> list[tuple[Box, Tensor]]:
        cut = self.holding.cut(weight.name)
        return boxes(weight, cut, self.holding.index(weight.name) if cut else 0, shard)

    def _parts(self, name: str, weight: Weight, shard: Tensor, restless: bool = False) -> list[Entry]:
        kept, written = self._role(weight, own=name.startswith(SITES))
        shape = tuple(self.holding.shapes[weight.name])
        return [Entry(name, box, shape, view, kept, written, restless) for box, view in self._boxes(weight, shard)]

    def _speaks(self, weight: Weight) -> bool:
        """Whether this rank speaks for all of a weight: it owns the weight, or has its first row."""
        if weight.optimized is not weight.shard:
            return weight.state_here
        return weight.first == 0 and weight.rows > 0 and self.holding.index(weight.name) == 0

    def _holders(self, weight: Weight, every_part: bool = False) -> dict[str, list[int] | None]:
        """Where the ranks are that hold the same rows as this one, which is among them; or, all of the state."""
        if every_part and weight.optimized is not weight.shard:
            return {"pp": self.holding.stage_ranks(weight.name), "dp": ALL}
        cut = self.holding.cut(weight.name)
        alike = [0] if every_part and cut is not None and cut.axis == "tp" else self.holding.alike(weight.name)
        return {"pp": self.holding.stage_ranks(weight.name), "dp": ALL, "tp": alike}

    def _role(self, weight: Weight, every_part: bool = False, own: bool = False) -> tuple[bool, bool]:
        """What `_kept_here` says of a weight, found once: it is asked between two steps. ``own``: a site's."""
        known = self._roles.get((weight.name, every_part, own))
        if known is None:
            places = self._holders(weight, every_part)
            if own and self.own:
                del places["dp"]
            known = self._roles[weight.name, every_part, own] = self._kept_here(weight.name, places)
        return known

    def _kept_here(self, name: str, places: dict[str, list[int] | None]) -> tuple[bool, bool]:
        """Whether this rank keeps what those there hold alike for its host, and whether it writes it for all."""
        here, key = self.hosts[self.mesh.rank], tuple((axis, at and tuple(at)) for axis, at in places.items())
        if key not in self._among:  # the same for most weights, and as many ranks as there are replicas
            holders = self.mesh.among(**places)
            self._among[key] = holders, [rank for rank in holders if self.hosts[rank] == here]
        holders, local = self._among[key]
        writer = holders[self._turn(name, len(holders))]
        if self.hosts[writer] == here:
            return writer == self.mesh.rank, writer == self.mesh.rank
        return local[self._turn(name, len(local))] == self.mesh.rank, False

    def _turn(self, name: str, of: int) -> int:
        """Whose turn a tensor is, of so many: shared out by size, the same on all ranks."""
        if of == 1:
            return 0
        if of not in self._turns:
            loads, turns = [0] * of, {}
            for known, shape in self.holding.shapes.items():
                turns[known] = loads.index(min(loads))
                loads[turns[known]] += math.prod(shape) + 1
            self._turns[of] = turns
        return self._turns[of].get(name, 0)
