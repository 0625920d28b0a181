"""A checkpoint's description in parts: nobody reads, or writes, what all ranks together have to say.

Each rank describes its own part. The first rank of every so many sums up what these say: each tensor's hash, how much
of it they hold, and where that lies, part by part, as the box around it. Rank 0 sums up the sums. Whoever wants some
rows of a tensor goes down from there, only to where they may lie. All functions here are pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from phalanx.checkpoint.manifest import Chunk, Damaged, Held, Manifest, counts, covered_once, digest, meet
from phalanx.parallel.weights.boxes import Box

FAN_OUT = 64
"""So many descriptions are summed up by one rank."""
Places = Mapping[str, Sequence[Box]]
"""Of each tensor that is wanted, the boxes."""


OF_EACH = ("options", "rank", "frozen")
"""What parts of one checkpoint may say differently."""


class Child(NamedTuple):
    """A description that is summed up."""

    file: str
    said: Manifest
    digest: str
    """Of the file as it is."""


def part_name(rank: int) -> str:
    return f"part-{rank:05d}.json"


def group_name(number: int) -> str:
    return f"group-{number:05d}.json"


def groups(world: int, fan_out: int = FAN_OUT) -> list[range]:
    """The ranks whose parts are summed up by the first of them; none where rank 0 alone can do it."""
    return [range(a, min(a + fan_out, world)) for a in range(0, world, fan_out)] if world > fan_out else []


def below(world: int, fan_out: int = FAN_OUT) -> list[str]:
    """What rank 0 sums up."""
    return [group_name(n) for n in range(len(groups(world, fan_out)))] or [part_name(rank) for rank in range(world)]


def summed(children: Sequence[Child]) -> Manifest:
    """What several descriptions say together; they must be of one attempt to save."""
    first = children[0].said
    options = {n: changed for child in children for n, changed in child.said.facts.get("options", {}).items()}
    shared = {"options": options, "rank": 0}  # a stage knows the options of its own weights
    if "frozen" in first.facts:
        shared["frozen"] = first.facts["frozen"]  # the first names what is left out, for all
    whole = Manifest({**first.facts, **shared}, {}, children={child.file: child.digest for child in children})
    for number, (_, child, _) in enumerate(children):
        if differs(child, whole):
            raise Damaged(f"a part of step {whole.step}", "was written by another attempt to save that step")
        whole.numbers |= child.numbers
        for name, held in child.tensors.items():
            known = whole.tensors.setdefault(name, Held(held.dtype, held.shape))
            if (known.dtype, known.shape) != (held.dtype, held.shape):
                raise Damaged(f"a part of step {whole.step}", f"has another {name} than the others")
            known.hash = (known.hash + held.hash) % (1 << 64)
            known.elements += elements(held)
            around = box_around(boxes_of(held))
            known.where.append([number, list(around.offsets), list(around.sizes)])
    return whole


def differs(part: Manifest, whole: Manifest) -> str:
    """In which fact a part is of another checkpoint; empty if it is of this one."""

    def shared(said: Manifest) -> dict[str, Any]:
        return {name: fact for name, fact in said.facts.items() if name not in OF_EACH}

    one, other = shared(part), shared(whole)
    return next((name for name in sorted(one.keys() | other) if one.get(name) != other.get(name)), "")


def check_belongs(content: bytes, child: Manifest, file: str, parent: Manifest, where: str) -> None:
    """Refuse a description that is not the one which its parent summed up, as one of another step or run."""
    known = parent.children.get(file, "")
    other = differs(child, parent) if parent.children else ""
    if (digest(content) != known) if known else other:
        told = f"its {other} differs, as in another run or attempt" if other else "it was written again"
        told = f"it is of step {child.step}" if child.step != parent.step else told
        raise Damaged(where, f"is not the part that step {parent.step} was committed with: {told}")


def check_sum(manifest: Manifest) -> None:
    """Whether the parts of all ranks hold as many elements as there are; that none is held twice shows when read."""
    for name, held in manifest.tensors.items():
        assert held.elements == math.prod(held.shape), f"{name}: {held.elements} of {math.prod(held.shape)} elements"


def elements(held: Held) -> int:
    """How many elements of a tensor a description accounts for."""
    return held.elements or sum(math.prod(chunk.box.sizes) for chunk in held.chunks)


def boxes_of(held: Held) -> list[Box]:
    """Where in the tensor they lie."""
    return [chunk.box for chunk in held.chunks] or [Box(counts(o), counts(s)) for _, o, s in held.where]


def box_around(boxes: Iterable[Box]) -> Box:
    boxes = list(boxes)
    low = [min(offsets) for offsets in zip(*(box.offsets for box in boxes), strict=True)]
    high = [max(ends) for ends in zip(*(_ends(box) for box in boxes), strict=True)]
    return Box(tuple(low), tuple(b - a for a, b in zip(low, high, strict=True)))


def needed(manifest: Manifest, wanted: Places, where: str) -> list[str]:
    """Which of the descriptions below this one may know of what is wanted."""
    found: set[int] = set()
    for name, boxes in wanted.items() if manifest.children else ():
        for number, around in _where(manifest, name, where):
            if number not in found and any(meet(around, box) for box in boxes):
                found.add(number)
    children = list(manifest.children)
    return [children[number] for number in sorted(found)]


def _where(manifest: Manifest, name: str, where: str) -> Iterator[tuple[int, Box]]:
    """Which descriptions know of a tensor, and the box around what they know of it; checked here, before it is used."""
    held = manifest.tensors.get(name)
    try:
        for number, offsets, sizes in held.where if held is not None else ():
            around = Box(counts(offsets), counts(sizes))
            assert held is not None
            if not len(around.offsets) == len(around.sizes) == len(held.shape) or number not in range(
                len(manifest.children)
            ):
                raise ValueError("it lies nowhere")
            yield number, around
    except (TypeError, ValueError) as error:
        raise Damaged(where, f"describes no checkpoint: of {name} it says that {error}") from None


def chosen(manifest: Manifest, wanted: Places) -> dict[str, list[Chunk]]:
    """The chunks of a part that hold some of what is wanted."""
    return {
        name: [chunk for chunk in manifest.tensors[name].chunks if any(meet(chunk.box, box) for box in boxes)]
        for name, boxes in wanted.items()
        if name in manifest.tensors
    }


def check_covers(name: str, boxes: Sequence[Box], chunks: Sequence[Chunk], where: str) -> None:
    """Whether chunks that were chosen hold each wanted element once."""
    for box in boxes:
        cut = [_common(box, chunk.box) for chunk in chunks if meet(box, chunk.box)]
        if not covered_once(box.sizes, cut):
            raise Damaged(where, f"describes no checkpoint: its chunks do not make up {name}")


def _common(box: Box, other: Box) -> Box:
    """What two boxes share, as it lies in the first."""
    low = [max(a, c) for a, c in zip(box.offsets, other.offsets, strict=True)]
    high = [min(a, b) for a, b in zip(_ends(box), _ends(other), strict=True)]
    offsets = tuple(a - start for a, start in zip(low, box.offsets, strict=True))
    return Box(offsets, tuple(b - a for a, b in zip(low, high, strict=True)))


def _ends(box: Box) -> list[int]:
    return [a + n for a, n in zip(box.offsets, box.sizes, strict=True)]
