"""Frozen weights: those that are never trained, and are as they began, are in no checkpoint.

They can be had where they came from: a folder, or the model's constructor and a seed. A checkpoint says which those
are, and their hashes, by which a run that goes on knows that it has the same ones. A weight that is trained at any time
is not frozen, nor is one that the model's own code writes to; buffers never are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.hashing import hashed, joined
from phalanx.checkpoint.manager import CheckpointManager
from phalanx.checkpoint.manifest import Damaged, Held, Manifest
from phalanx.checkpoint.pretrained import beginning
from phalanx.checkpoint.state import State
from phalanx.errors import WrongUse
from phalanx.parallel.spread import Spread
from phalanx.parallel.weights.blueprint import Blueprint
from phalanx.parallel.weights.boxes import Box
from phalanx.parallel.weights.filling import Saved
from phalanx.task import Task
from phalanx.words import many

Begun = str | Path | Mapping[str, Path] | None
"""Where weights began: in a folder, in several by how their names begin, or as they were made."""


class Frozen:
    """What the checkpoints of a run leave out. All ranks know the same."""

    def __init__(self, spread: Spread, begun: Begun, seed: int) -> None:
        self.spread, self.begun = spread, _said(begun, seed)
        shapes = spread.holding.shapes
        self.names = {name for name, trained in spread.trainable.items() if not trained and shapes[name].numel()}
        """Of the weights that are left out, of any stage; it only becomes smaller."""
        self._hashes: dict[str, int] = {}

    def keep(self, names: Iterable[str]) -> None:
        """From now on these are in checkpoints."""
        self.names.difference_update(names)

    def keep_written(self) -> None:
        """Keep what the model's own code has written to, on any rank. All ranks must call it."""
        if self.names:
            own = [name for name, weight in self.spread.weights.items() if name in self.names and weight.written]
            self.keep(name for said in self.spread.mesh.everybody.world.all_gather_words(own) for name in said)

    def facts(self, state: State) -> dict[str, Any]:
        """What a checkpoint says of them; the first rank of a host names each. All ranks must ask."""
        if not self.names:
            return {}
        held = self._held(state, self.names)
        found: dict[str, Any] = {"from": self.begun, "hash": _joined(held)}
        rank = self.spread.mesh.everybody.rank
        if state.hosts.index(state.hosts[rank]) == rank:
            found["tensors"] = {n: [one.dtype, list(one.shape), f"{one.hash:016x}"] for n, one in sorted(held.items())}
        return {"frozen": found}

    def _held(self, state: State, names: Iterable[str]) -> dict[str, Held]:
        """What weights are, by a hash of each that all ranks make together."""
        weights = self.spread.placement.weights
        dtypes = {name: str(weights[name].policy.dtype).removeprefix("torch.") for name in names}
        self._hashes |= self._hashed(state, {name: dtypes[name] for name in dtypes.keys() - self._hashes.keys()})
        return {n: Held(dtypes[n], tuple(weights[n].shape), self._hashes[n]) for n in names}

    def _hashed(self, state: State, dtypes: Mapping[str, str]) -> dict[str, int]:
        """Hashes of weights as they are in these dtypes. All ranks must ask for the same."""
        if not dtypes:
            return {}
        sums = dict.fromkeys(sorted(dtypes), 0)
        for entry in state.values(sums):
            value = entry.value.to(getattr(torch, dtypes[entry.name]))
            sums[entry.name] += hashed(value, entry.box, entry.shape)
        total = torch.tensor([_signed(value) for value in sums.values()], device=self.spread.device)
        self.spread.mesh.everybody.world.all_reduce(total).wait()
        return {name: value % (1 << 64) for name, value in zip(sums, total.tolist(), strict=True)}

    def take_up(self, state: State, manifest: Manifest) -> None:
        """After a checkpoint was read: is what it leaves out the same here? All ranks must call it."""
        shapes = self.spread.holding.shapes
        missing = {n for n, shape in shapes.items() if shape.numel() and f"model/{n}" not in manifest.tensors}
        missing &= self.spread.trainable.keys()
        self.keep(self.names - missing)
        here, known = self._held(state, missing), manifest.frozen
        others = {n: known[n].dtype for n, one in here.items() if n in known and known[n].dtype != one.dtype}
        hashes = self._hashed(state, others)
        as_saved = {name: replace(here[name], dtype=others[name], hash=value) for name, value in hashes.items()}
        self._check(here | as_saved, manifest, {name: here[name].dtype for name in others})
        for name in missing - self.names:
            del self._hashes[name]  # it is trained from here on

    def take_up_memory(self, state: State, manifest: Manifest) -> None:
        """The same after copies in memory were, which hold what this host needs."""
        own = [name for name in self.names if f"model/{name}" in manifest.tensors]
        self.keep(name for said in self.spread.mesh.everybody.world.all_gather_words(own) for name in said)
        self._check(self._held(state, self.names), manifest)

    def _check(self, here: Mapping[str, Held], manifest: Manifest, dtypes: Mapping[str, str] | None = None) -> None:
        """``dtypes``: of those that are held in others than the checkpoint says."""
        said = manifest.facts.get("frozen", {})
        if not here or _joined(here) == said.get("hash"):
            return
        known = manifest.frozen
        name = next((n for n, one in sorted(here.items()) if n in known and one != known[n]), None)
        other = "" if name is None else f", {name} among them"
        if name is not None and dtypes is not None and name in dtypes:
            then = manifest.facts["precision"]
            other += f", in {known[name].dtype} then and {dtypes[name]} now: precision={then} then"
        raise WrongUse(_changed(manifest, self.begun, f"{many(len(here), 'frozen weight')}{other}"))


def _changed(manifest: Manifest, begun: object, which: str) -> str:
    return (
        f"{begun} does not give the weights that step {manifest.step} was trained with ({which}), and the checkpoint "
        f"leaves them to {manifest.facts.get('frozen', {}).get('from', 'where they came from')}. Have that as it was: "
        "the same files, seed, precision and versions; or begin a new run."
    )


def _said(begun: Begun, seed: int) -> str:
    if isinstance(begun, Mapping):
        return " and ".join(map(str, begun.values()))
    return f"the constructor and seed {seed}" if begun is None else str(begun)


def _signed(value: int) -> int:
    value %= 1 << 64
    return value - (1 << 64) if value >> 63 else value


def _joined(held: Mapping[str, Held]) -> str:
    return joined((name, one.dtype, one.shape, one.hash) for name, one in held.items())


def leaves_out(manager: CheckpointManager) -> bool:
    """Whether the newest checkpoint that says anything leaves weights out."""
    for step in reversed(manager.steps()):
        try:
            return "frozen" in manager.open(step).manifest.facts
        except (Damaged, OSError):
            continue
    return False


def beginnings(blueprint: Blueprint, begun: Begun, task: Task, manifest: Manifest) -> Callable[[str], Tensor]:
    """Gives weights that a checkpoint leaves out, whole, from where they came from; refuses others."""
    described = dict(blueprint.model.named_parameters())
    place = _said(begun, blueprint.seed)

    @cache
    def saved() -> Saved:
        if begun is None:
            return lambda name, cut, rank: None
        return beginning(begun, blueprint.model, manifest.facts["tied"], task)

    def whole(name: str) -> Tensor:
        held = manifest.frozen[name]
        value = saved()(name, None, 0) if name in described else None
        if value is None and name in described:
            value = blueprint.value(described[name], "cpu")
        if value is not None and tuple(value.shape) == held.shape:
            value = value.to(getattr(torch, held.dtype))
            if hashed(value, Box.whole(value), held.shape) == held.hash:
                return value
        raise WrongUse(_changed(manifest, place, f"{name} is another"))

    return whole
