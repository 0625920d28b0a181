"""What sites that train by themselves have of their own, in checkpoints: which of it a rank of any layout takes up.

As many sites as there were take up each its own. Otherwise each takes the mean over all that are there, which is also
what a layout without sites goes on with: of a lost site nothing is there, and a new one begins with what others have.
That holds for weights, too, where those of sites are not what all have agreed on, and all of them are there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.checkpoint.manifest import Manifest
from phalanx.layout import Layout

SITES, VELOCITY, UNTOLD = "sites/", "outer/velocity/", "untold"
Kept = dict[str, dict[tuple[str, str], list[str]]]
"""By weight, and by kind and key of what is kept of it: the names under which it is saved."""


def common(name: str) -> str:
    """A saved tensor's name without the site whose own it is."""
    return name.split("/", 2)[2] if name.startswith(SITES) and name.count("/") > 2 else name


def those_there(manifest: Manifest) -> list[str]:
    """The sites of which something is there: how the names of it begin."""
    names = [*manifest.tensors, *manifest.numbers]
    there = sorted({int(name.split("/", 2)[1]) for name in names if name.startswith(SITES)})
    return [f"{SITES}{number}/" for number in there]


def sites_then(manifest: Manifest) -> int:
    """How many there were when it was saved."""
    layout = manifest.facts.get("layout")
    return len(those_there(manifest)) if layout is None else Layout.parse(layout).dp


def sites_missing(manifest: Manifest) -> bool:
    """Whether something of some sites alone is there, as in the memory of a host that has its own."""
    return 0 < len(those_there(manifest)) < sites_then(manifest)


@dataclass(frozen=True)
class Taken:
    """Whose of it a rank takes up. What it begins a name with stands for a site."""

    there: tuple[str, ...]
    """The sites of which something is there."""
    complete: bool
    """No site's is missing."""
    own: str
    """This site, where it goes on as itself; else nothing."""
    sites: int
    """How many there are now."""

    @classmethod
    def of(cls, manifest: Manifest, own: str, sites: int) -> Taken:
        """``own``: this site, of so many ``sites``."""
        there, goes_on = tuple(those_there(manifest)), sites_then(manifest) == sites
        return cls(there, not sites_missing(manifest), own if own in there and goes_on else "", sites)

    @property
    def whose(self) -> tuple[str, ...]:
        """Those whose optimizer's state is taken up: in the mean, if they are several."""
        return (self.own,) if self.own else self.there or ("",)

    def weights(self, apart: bool) -> tuple[str, ...]:
        """Those whose own weights are, where they are there; ``apart``: sites go on with weights of their own.

        The mean of some of them is not what all sites have agreed on, and the same on every host: then nobody's are.
        """
        return (self.own,) if self.own and apart else self.there if self.complete else ()

    def kept(self, manifest: Manifest) -> Kept:
        """What optimizers keep of each weight, and where."""
        found: Kept = {}
        for name in [*manifest.tensors, *manifest.numbers]:
            rest = common(name)
            kind, key, owner = [*rest.split("/", 2), "", ""][:3]
            if kind in ("optimizer", "counters") and name.removesuffix(rest) in self.whose:
                found.setdefault(owner, {}).setdefault((kind, key), []).append(name)
        return found

    def untold(self, manifest: Manifest, here: int) -> list[float]:
        """What sites had yet to tell of their steps, added up: the share of one of those that take it up.

        They are all sites; of what the memory of one host alone has, those on this host, ``here``.
        """
        among = 1 if self.own else self.sites if self.complete else here
        found = [numbers for each in self.whose if (numbers := manifest.numbers.get(f"{each}{UNTOLD}"))]
        return [sum(numbers) / among for numbers in zip(*found, strict=True)]


class MeanOfSites:
    """What several sites have of one tensor, read into one room: their mean, or the largest of counters."""

    def __init__(self, room: Tensor, sites: int, counters: bool = False) -> None:
        self.room, self.sites, self.counters = room, sites, counters
        wide = counters or room.dtype in (torch.float32, torch.float64)
        self.total = room.zero_() if wide else torch.zeros_like(room, dtype=torch.float32)

    @torch.no_grad()
    def join(self, there: Tensor, one: Tensor) -> None:
        """Put one site's part to what is there."""
        torch.maximum(there, one, out=there) if self.counters else there.add_(one)

    @torch.no_grad()
    def settle(self) -> None:
        """All have been read."""
        if not self.counters:
            self.room.copy_(self.total.div_(self.sites))
