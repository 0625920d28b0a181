"""What sites that train by themselves have of their own, in checkpoints: which of it a rank of any layout takes up.

As many sites as there were take up each its own, and so does one of which alone a host's memory has something: others
were lost. Otherwise each takes the mean over all that are there, which is also what a layout without sites goes on
with: of a lost site nothing is there, and a new one begins with what others have. That holds for weights, too, where
those of sites are not what all have agreed on.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def sources(manifest: Manifest, own: str, sites: int) -> list[str]:
    """Whose of it is taken up: how these names begin. ``own``: this site's do so, of as many ``sites``."""
    there = those_there(manifest)
    return [own] if own in there and sites_then(manifest) == sites else there or [""]


def kept_by(manifest: Manifest, own: str, sites: int) -> Kept:
    """What optimizers keep of each weight, and where."""
    found: Kept = {}
    taken = sources(manifest, own, sites)
    for name in [*manifest.tensors, *manifest.numbers]:
        rest = common(name)
        kind, key, owner = [*rest.split("/", 2), "", ""][:3]
        if kind in ("optimizer", "counters") and name.removesuffix(rest) in taken:
            found.setdefault(owner, {}).setdefault((kind, key), []).append(name)
    return found


@torch.no_grad()
def joined(rooms: Sequence[Tensor], counters: bool) -> None:
    """Have the first be the mean of all; of ``counters`` the largest."""
    wide = torch.float64 if rooms[0].dtype == torch.float64 else torch.float32
    every = [room.to(wide) for room in rooms]
    total = torch.stack(every).amax(0) if counters else sum(every[1:], every[0].clone()) / len(every)
    rooms[0].copy_(total)


def untold(manifest: Manifest, whose: Sequence[str], sites: int, here: int) -> list[float]:
    """What sites had yet to tell of their steps, added up: the share of one of those that take it up.

    They are all ``sites``; of what the memory of one host alone has, those on this host, ``here``.
    """
    among = 1 if len(whose) == 1 else sites if len(whose) == sites_then(manifest) else here
    found = [numbers for each in whose if (numbers := manifest.numbers.get(f"{each}{UNTOLD}"))]
    return [sum(numbers) / among for numbers in zip(*found, strict=True)]
