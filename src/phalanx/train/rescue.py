"""The newest state that hosts hold in memory, written to a file, from which any layout reads: where a host was lost.

Its ranks' last copies lie in its neighbour's memory; they are written together with everybody's. Hosts that are
replicas or sites keep no copies of each other's: one writes what it has, and others what they have of their own. What
is lost then is what the lost host owed of gradients, or its site's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.index import groups
from phalanx.checkpoint.manager import CheckpointManager
from phalanx.checkpoint.owed import COMM
from phalanx.checkpoint.sites import SITES
from phalanx.checkpoint.slot import Staged, StagedEntry
from phalanx.checkpoint.write import pieces, shards
from phalanx.train.engine import Engine

Moment = tuple[int, int]
"""A copy's generation and step: only copies of one moment belong together."""
Held = Mapping[Moment, Sequence[Staged]]
"""All whole copies on a host, by moment."""


class Rescue:
    """A rank's part in it. All ranks must make one."""

    def __init__(self, engine: Engine, manager: CheckpointManager, generation: int, held: Held) -> None:
        """``held``: on this rank's host."""
        self.manager, self.generation, self.held = manager, generation, held
        hosts, self.here = engine.environment.hosts, engine.environment.rank
        self.world, self.patience = engine.mesh.world, engine.timeout.total_seconds()
        self.speaks = hosts.index(hosts[self.here]) == self.here
        """For its host."""
        self.rank_0 = self.here == 0

    def write(self, newest_file: int, needed: Callable[[], set[str]]) -> int | None:
        """Write the newest moment that is whole, if it beats the files; its step. ``needed``: by any state."""
        holders, sizes = self._copies()
        together = max((m for m, world in sizes.items() if all((*m, r) in holders for r in range(world))), default=None)
        alone, writer, owes = self._alone(needed)
        moment = max(filter(None, (together, alone)), default=None)
        if moment is None or moment[1] <= newest_file:
            return None
        here, parts = self.held.get(moment, ()), sizes[moment]
        if moment == together:
            for staged in here:
                rank = staged.facts["rank"]
                if holders[*moment, rank] == self.here:
                    self.manager.write(self.generation, moment[1], rank, shards(staged), staged.facts, staged.numbers)
        else:
            speakers = sorted({speaker for (*of, _), speaker in holders.items() if tuple(of) == moment} - {writer})
            parts = 1 + len(speakers)
            if self.here in (writer, *speakers):
                self._write_part(moment, [writer, *speakers].index(self.here), here, owes)
        self._commit(moment[1], parts)
        return moment[1]

    def _write_part(self, moment: Moment, part: int, found: Sequence[Staged], owed: bool) -> None:
        """All that this host has whole; beside another that does so, what its ranks owe, and its sites' own.

        ``owed``: anything was, and so by those who are not here.
        """
        whole, _ = coverage(found)
        whole = {name for name in whole if not part or name.startswith((SITES, COMM))}
        facts, numbers = joined(found)
        numbers = {name: number for name, number in numbers.items() if not part or name.startswith(SITES)}
        entries = ((place, tensor) for place, tensor in once(found) if place.name in whole)
        facts = {**facts, "owed_missing": owed}
        self.manager.write(self.generation, moment[1], part, pieces(entries), facts, numbers)

    def _copies(self) -> tuple[dict[tuple[int, int, int], int], dict[Moment, int]]:
        """Who has each rank's copy of each moment; and how many ranks there were."""
        own = [staged.facts for found in self.held.values() for staged in found] if self.speaks else []
        words = [f"{each['generation']} {each['step']} {each['rank']} {each['world']}" for each in own]
        holders: dict[tuple[int, int, int], int] = {}
        sizes: dict[Moment, int] = {}
        for speaker, said in enumerate(self.world.all_gather_words(words)):
            for generation, step, rank, world in (map(int, word.split()) for word in said):
                holders.setdefault((generation, step, rank), speaker)
                sizes[generation, step] = world
        return holders, sizes

    def _alone(self, needed: Callable[[], set[str]]) -> tuple[Moment | None, int, bool]:
        """The newest moment that one host has but for what others owed, a rank there, and whether anything was owed."""
        words = []
        for (generation, step), found in self.held.items() if self.speaks else ():
            whole, parts = coverage(found)
            if needed() <= whole and all(name.startswith((COMM, SITES)) for name in parts):
                owes = any(name.startswith(COMM) for name in whole | parts)
                words.append(f"{generation} {step} {int(owes)}")
        said = self.world.all_gather_words(words)
        every = [(int(g), int(s), -rank, o == "1") for rank, own in enumerate(said) for g, s, o in map(str.split, own)]
        if not every:
            return None, -1, False
        generation, step, writer, owes = max(every)
        return (generation, step), -writer, owes

    def _commit(self, step: int, parts: int) -> None:
        if self.rank_0:
            for ranks in groups(parts):
                self.manager.gather(self.generation, step, ranks, self.patience)
            self.manager.commit(self.generation, step, parts, self.patience, lambda: False)
        self.world.all_gather_words([])  # it is there when all go on


def moment_of(staged: Staged) -> Moment:
    return staged.facts["generation"], staged.step


def joined(found: Sequence[Staged]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What these copies of a host say beside tensors: their facts, and numbers."""
    first = min(found, key=lambda staged: int(staged.facts["rank"]))  # it names what is left out
    options = {name: each for staged in found for name, each in staged.facts["options"].items()}
    numbers = {name: each for staged in found for name, each in staged.numbers.items()}
    return {**first.facts, "options": options}, numbers


def once(found: Sequence[Staged]) -> Iterator[tuple[StagedEntry, Tensor]]:
    """Everything in these copies, what several hold alike only once."""
    seen = set()
    for staged in found:
        for place, tensor in staged.tensors:
            if (place.name, place.box) not in seen:
                seen.add((place.name, place.box))
                yield place, tensor


def coverage(found: Sequence[Staged]) -> tuple[set[str], set[str]]:
    """Tensors that these copies together hold whole, and those of which a part is missing."""
    held: dict[str, int] = {}
    shapes: dict[str, int] = {}
    for place, tensor in once(found):
        held[place.name] = held.get(place.name, 0) + tensor.numel()
        shapes[place.name] = torch.Size(place.shape).numel()
    whole = {name for name in held if held[name] == shapes[name]}
    return whole, held.keys() - whole
