"""What memory a rank holds, by part: weights, gradients, the optimizer's state, activations, all else."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phalanx.train.memory import held
from phalanx.trees import leaves
from phalanx.watch.screen import memory_bytes

if TYPE_CHECKING:
    from phalanx.train.engine import Engine

CHANGED = 0.01
"""A part is told again when it differs from what was last told by so much of the whole."""
EVERY, COUNTED_EVERY = 10, 1000
"""Steps between two looks at the whole, and between two counts of what tensors hold."""


def by_part(engine: Engine) -> Iterator[tuple[str, Iterable[Tensor]]]:
    """The tensors that an engine keeps."""
    weights = engine.spread.weights.values()
    yield "weights", [tensor.detach() for weight in weights for tensor in (weight.full, weight.shard)]
    buckets = engine.spread.reduction.buckets
    gradients = [tensor for bucket in buckets for tensor in (bucket.gradients, bucket.owned)]
    gradients += [room for b in buckets if b.coded for owed in b.coded.all_owed() for room in owed.rooms()]
    gradients += [tensor.grad for weight in weights for tensor in (weight.full, weight.shard)]
    yield "gradients", [tensor for tensor in gradients if tensor is not None]
    yield "optimizer", leaves(list(engine.optimizer.state.values()), Tensor)
    yield "callbacks", leaves(list(engine.callbacks.tensors().values()), Tensor)
    yield "sites", [] if engine.spread.outer is None else engine.spread.outer.tensors()


def counted(engine: Engine, device: torch.device) -> dict[str, int]:
    """Bytes that each part holds on a device now; each memory counted once, by the first part that it belongs to."""
    seen: set[int] = set()
    found = {}
    for name, tensors in by_part(engine):
        found[name] = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device == device and storage.data_ptr() not in seen and storage.nbytes():
                seen.add(storage.data_ptr())
                found[name] += storage.nbytes()
    return found


def held_now(device: torch.device) -> int:
    """By tensors on a GPU, or by this process on its host."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return memory_bytes(device)


class HeldMemory:
    """Asked after every step; tells what has changed."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.device = engine, engine.device
        placement, kept, dtypes = engine.spread.placement, engine.kept, engine.dtypes
        self._gradients = held(placement, engine.spread.mesh, kept, dtypes, 0.0).gradients
        self._parts = counted(engine, self.device)
        self._before = max(0, held_now(self.device) - sum(self._parts.values()))
        """Held before the first step, and by none of the parts: on a host Python and its libraries."""
        self._steps = 0
        self._told: dict[str, int] = {}

    def changed(self) -> dict[str, int]:
        """After a step: bytes by name, of those that are other than last told."""
        self._steps += 1
        if self._steps > EVERY and self._steps % EVERY:
            return {}
        if self._steps <= 2 or self._steps % COUNTED_EVERY == 0:
            self._parts = counted(self.engine, self.device)
        found = self.parts()
        least = CHANGED * found["memory_peak"]
        news = {name: size for name, size in found.items() if abs(size - self._told.get(name, -1)) >= least}
        news |= {name: size for name, size in found.items() if name not in self._told}
        self._told |= news
        return news

    def parts(self) -> dict[str, int]:
        """Of the peak; and the whole, at its peak and now."""
        now, peak = held_now(self.device), memory_bytes(self.device)
        weights, optimizer, sites = (self._parts[name] for name in ("weights", "optimizer", "sites"))
        known = weights + optimizer + sites + self._gradients
        other = max(0, now - known) if self.device.type == "cuda" else self._before
        other += 0 if self.device.type == "cuda" else self._parts["callbacks"]
        return {
            "memory_weights": weights, "memory_gradients": self._gradients, "memory_optimizer": optimizer,
            **({"memory_sites": sites} if sites else {}),
            "memory_activations": max(0, peak - known - other), "memory_other": other, "memory_now": now,
            "memory_peak": max(now, peak),
        }  # fmt: skip
