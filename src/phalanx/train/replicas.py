"""Silent corruption: ranks that hold the same weights compare their bits, and one that disagrees is named.

Compared are the rows that replicas (``dp``) hold alike, and what ranks hold whole beside their rows (ZeRO 1 and 2).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phalanx.checkpoint.hashing import hashed
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.weights.boxes import Box

if TYPE_CHECKING:
    from phalanx.train.engine import Engine


class Corrupted(RuntimeError):
    """Ranks that should hold the same do not."""

    def __init__(self, where: str, ranks: list[int], sure: bool) -> None:
        self.where, self.ranks, self.sure = where, ranks, sure
        named = ", ".join(map(str, ranks))
        kind = "differs from the others'" if sure else "is not the same, and two cannot tell which of them is right"
        super().__init__(f"silent corruption: {where} of rank {named} {kind}")


EARLIEST = 16
"""The first step after which ranks compare; then after twice as many, until it is as often as they were told to."""


def is_compared(step: int, every: int) -> bool:
    """Whether ranks compare after so many steps: what is wrong from the beginning is not left for long."""
    return step % every == 0 or (EARLIEST <= step < every and step & (step - 1) == 0)


def comparable(engine: Engine) -> bool:
    """Whether any two ranks hold the same, so that they could disagree."""
    return any(engine.mesh.size(axis) > 1 for axis in _axes(engine))


def _axes(engine: Engine) -> list[str]:
    whole = any(w.storage.always_whole for w in engine.spread.weights.values()) and engine.mesh.size("fsdp", "cp") > 1
    return ["dp", *(["fsdp"] if whole else [])]


def compare(engine: Engine) -> None:
    """Raise `Corrupted` on all ranks if any two of them differ. All ranks must call it."""
    found: list[str] = []
    for name, weight in engine.spread.weights.items():
        outer = engine.spread.outer
        alike = weight.shard.data if outer is None else outer.agreed.get(name, weight.shard.data)
        found += _differing(engine, name, alike, engine.mesh.group("dp"))
        if weight.storage.always_whole and weight.shard is not weight.full:
            found += _differing(engine, name, weight.full.data, weight.storage.group)
    told = [words for said in engine.mesh.world.all_gather_words(found) for words in said]
    if told:
        votes = Counter(tuple(words.split(" ", 2)) for words in told)
        (sure, ranks, name), _ = votes.most_common(1)[0]
        raise Corrupted(name, [int(rank) for rank in ranks.split(",")], sure == "sure")


def _differing(engine: Engine, name: str, tensor: Tensor, group: Communicator) -> list[str]:
    """Who differs from the most in a group: "sure 3 name", or all of them where there is no majority."""
    if group.alone or not tensor.numel():
        return []
    value = hashed(tensor, Box.whole(tensor), tensor.shape)
    own = torch.tensor([value - (1 << 64) if value >> 63 else value], device=engine.device)
    every = own.new_empty(group.size, 1)
    group.all_gather(every, own).wait()
    values = every.flatten().tolist()
    usual, count = Counter(values).most_common(1)[0]
    if count == len(values):
        return []
    sure = 2 * count > len(values)
    wrong = [rank for rank, value in zip(group.members, values, strict=True) if not sure or value != usual]
    return [f"{'sure' if sure else 'unsure'} {','.join(map(str, wrong))} {name}"]
