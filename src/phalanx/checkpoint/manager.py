"""A run's checkpoints: written aside, committed at once, kept or let go, found again whole or not at all."""

from __future__ import annotations

import errno
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.best import Best, read_best, write_best
from phalanx.checkpoint.commits import Fenced, commits_of, name_of
from phalanx.checkpoint.hashing import hashed
from phalanx.checkpoint.index import (
    FAN_OUT,
    Child,
    Places,
    below,
    check_belongs,
    check_covers,
    check_sum,
    chosen,
    group_name,
    needed,
    part_name,
    summed,
)
from phalanx.checkpoint.manifest import MANIFEST, Chunk, Damaged, Held, Manifest, covered_once, digest, unreadable
from phalanx.checkpoint.read import Wanted, read
from phalanx.checkpoint.store import Store
from phalanx.checkpoint.write import Piece, check_file, write_part
from phalanx.errors import WrongUse
from phalanx.parallel.weights.boxes import Box

POLL_SECONDS, SLOWEST_POLL_SECONDS = 0.02, 1.0
REMEMBERED = 256
"""So many descriptions of parts are kept in memory."""
ATTEMPTS = 4
FINAL = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EINVAL, errno.ELOOP)
"""What trying again does not change."""


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint."""

    store: Store
    name: str
    manifest: Manifest
    began: Callable[[str], Tensor] | None = field(default=None, repr=False, compare=False)
    """Gives a weight that it leaves out, by the model's name."""
    stands_in: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """By name, the saved tensor that `tensor` gives in place of one of the model's: an average of it."""
    _known: dict[str, Manifest] = field(default_factory=dict, repr=False, compare=False)

    @property
    def where(self) -> str:
        return f"{self.store.url}/{self.name}"

    @property
    def caution(self) -> str:
        """What cannot be seen of a checkpoint that an older version wrote; empty for others."""
        if not self.manifest.children or self.manifest.has_hashes:
            return ""
        return (
            f"{self.where} was written by an older version, without hashes of its parts: a part of another run with "
            "the same settings would not be noticed in it"
        )

    def fetch(self, chunk: Chunk) -> Tensor:
        """A chunk, checked."""
        file = f"{self.name}/{chunk.file}"
        content = _read(self.store, file, chunk.start, chunk.start + chunk.length)
        content = chunk.checked(content, f"{self.store.url}/{file}")
        dtype = getattr(torch, self.manifest.tensors[chunk.tensor].dtype)
        return torch.frombuffer(bytearray(content), dtype=dtype).view(chunk.box.sizes)

    def described(self, file: str, parent: Manifest) -> Manifest:
        """What a file below the manifest says, as its ``parent`` knows it; the last ones are remembered."""
        if file not in self._known:
            content, where = _read(self.store, f"{self.name}/{file}"), f"{self.where}/{file}"
            found = Manifest.parse(content, where)
            check_belongs(content, found, file, parent, where)
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[file] = found
        return self._known[file]

    def holding(self, wanted: Places | None = None) -> dict[str, Held]:
        """The chunks that hold what is wanted, or everything; it is damaged if they do not hold each element once."""
        if wanted is None:
            wanted = {name: [Box((0,) * len(held.shape), held.shape)] for name, held in self.manifest.tensors.items()}
        found = {n: Held(h.dtype, h.shape, h.hash) for n in wanted if (h := self.manifest.tensors[n])}
        ahead, seen = [(MANIFEST, self.manifest)], set()
        while ahead:
            file, node = ahead.pop(0)
            for name, chunks in chosen(node, wanted).items():
                if (node.tensors[name].dtype, node.tensors[name].shape) != (found[name].dtype, found[name].shape):
                    raise Damaged(f"{self.where}/{file}", f"has another {name} than the others")
                found[name].chunks += chunks
            for child in needed(node, wanted, f"{self.where}/{file}"):
                if child in seen:
                    raise Damaged(f"{self.where}/{file}", f"describes no checkpoint: it leads to {child} twice")
                seen.add(child)
                ahead.append((child, self.described(child, node)))
        for name, boxes in wanted.items():
            check_covers(name, boxes, found[name].chunks, f"{self.where}/{MANIFEST}")
        return found

    def read(self, wanted: Wanted) -> None:
        boxes = {name: [box for box, _ in parts] for name, parts in wanted.items()}
        read(self.holding(boxes), self.fetch, wanted)

    def with_weights(self, name: str) -> Checkpoint:
        """The same, whose weights are those that a callback of this name keeps, as an average; others stay."""
        kept: dict[str, dict[str, str]] = {}
        weights = self.manifest.weights()
        for full, held in self.manifest.tensors.items():
            kind, label, weight = [*full.split("/", 2), "", ""][:3]
            if kind == "callbacks" and weight in weights and held.shape == weights[weight].shape:
                kept.setdefault(label, {})[f"model/{weight}"] = full
        found = next((tensors for label, tensors in kept.items() if label.lower() == name.lower()), None)
        if found is None:
            raise WrongUse(
                f"step {self.manifest.step} has no weights {name!r}: a callback of that name keeps none. Choose one "
                f"of: {', '.join(['model', *sorted(kept)])}."
            )
        return replace(self, stands_in=found)

    def tensor(self, name: str) -> Tensor:
        """A whole tensor."""
        own = name.removeprefix("model/")
        if name in self.stands_in:
            return self._whole(self.stands_in[name]).to(getattr(torch, self.manifest.weights()[own].dtype))
        if own in self.manifest.frozen:
            if self.began is None:
                origin = self.manifest.facts["frozen"]["from"]
                raise WrongUse(f"{self.where} leaves {own} to {origin}. Export it by the folder of its run.")
            return self.began(own)
        return self._whole(name)

    def _whole(self, name: str) -> Tensor:
        held = self.manifest.tensors[name]
        chunks = self.holding({name: [Box((0,) * len(held.shape), held.shape)]})[name].chunks
        for chunk in chunks:  # before memory is asked for
            file = f"{self.name}/{chunk.file}"
            try:
                if self.store.size(file) < chunk.start + chunk.length:
                    raise Damaged(f"{self.store.url}/{file}", f"is too short to hold {name}")
            except OSError as error:
                raise unreadable(f"{self.store.url}/{file}", error) from None
        whole = torch.empty(held.shape, dtype=getattr(torch, held.dtype))
        for chunk in chunks:
            spans = tuple(slice(a, a + n) for a, n in zip(chunk.box.offsets, chunk.box.sizes, strict=True))
            whole[spans] = self.fetch(chunk)
        return whole

    def verify(self, progress: Callable[[int], None] | None = None) -> Iterator[Damaged]:
        """Everything that is wrong with it: every byte read and checked, every tensor's hash made again."""
        total: dict[str, Held] = {name: Held(h.dtype, h.shape) for name, h in self.manifest.tensors.items()}
        torn: set[str] = set()
        for found in self._parts(MANIFEST, self.manifest):
            if isinstance(found, Damaged):
                yield found
                torn |= total.keys()
                continue
            file, part = found
            try:
                check_file(self.store, f"{self.name}/{file.removesuffix('.json')}.safetensors", part)
            except Damaged as damage:
                yield damage
            for name, held in part.tensors.items():
                try:
                    for chunk in held.chunks if name in total else ():  # else it does not sum up, and that is told
                        total[name].hash += hashed(self.fetch(chunk), chunk.box, held.shape)
                        total[name].chunks.append(chunk)
                        if progress is not None:
                            progress(chunk.length)
                except Damaged as damage:
                    yield damage
                    torn.add(name)
        for name, held in self.manifest.tensors.items():
            whole = covered_once(held.shape, [chunk.box for chunk in total[name].chunks])
            if name not in torn and not (whole and total[name].hash % (1 << 64) == held.hash):
                yield Damaged(f"{self.where}/{MANIFEST}", f"does not have the hash of {name} as it is")

    def _parts(self, file: str, node: Manifest) -> Iterator[tuple[str, Manifest] | Damaged]:
        """Every rank's description, and what is wrong on the way to it."""
        children: list[Child] = []
        names = list(node.children) or _files_of(node)
        for child in names:
            try:
                children.append(Child(child, self.described(child, node), node.children.get(child, "")))
            except Damaged as damage:
                yield damage
                continue
            if file == MANIFEST and children[-1].said.children:
                yield from self._parts(child, children[-1].said)
            else:
                yield child, children[-1].said
        if len(children) == len(names) and (name := _not_summed(node, children)):
            yield Damaged(f"{self.where}/{file}", f"does not say of {name} what its parts say")


def _files_of(whole: Manifest) -> list[str]:
    """The descriptions of the parts of a checkpoint of format 1, which has all chunks itself."""
    files = {chunk.file for held in whole.tensors.values() for chunk in held.chunks}
    return sorted(f"{file.removesuffix('.safetensors')}.json" for file in files)


def _not_summed(node: Manifest, children: Sequence[Child]) -> str:
    """The first tensor of which a description says something else than those that it sums up."""
    if not children:
        return ""
    try:
        said = summed(children).tensors
    except (Damaged, TypeError, ValueError):
        return "its tensors"
    if not node.children:  # an older version's, which has all chunks itself
        parts = [child.said.tensors for child in children]
        for name, held in said.items():
            chunks = [chunk for part in parts if name in part for chunk in part[name].chunks]
            said[name] = Held(held.dtype, held.shape, held.hash, chunks)
    return next((name for name in sorted(said.keys() | node.tensors) if said.get(name) != node.tensors.get(name)), "")


class CheckpointManager:
    """All checkpoints of a run."""

    def __init__(self, store: Store) -> None:
        self.store, self.commits = store, commits_of(store)

    def name(self, step: int) -> str:
        """The folder of a committed step."""
        return self.commits.folders().get(step, name_of(step))

    def steps(self) -> list[int]:
        """Of committed checkpoints, the oldest first."""
        return list(self.commits.folders())

    def empty(self) -> bool:
        """Whether nothing was ever written here, or what lies here is not what was."""
        return not set(self.store.names()) - {"lock"}

    def open(self, step: int) -> Checkpoint:
        name = self.name(step)
        file = f"{name}/{MANIFEST}"
        manifest = Manifest.parse(_read(self.store, file), f"{self.store.url}/{file}")
        manifest.check_whole(f"{self.store.url}/{file}")
        if manifest.step != step:
            raise Damaged(f"{self.store.url}/{file}", f"is of step {manifest.step}, and its folder of step {step}")
        return Checkpoint(self.store, name, manifest)

    def write(
        self,
        generation: int,
        step: int,
        rank: int,
        given: Iterable[Piece],
        facts: dict[str, Any],
        numbers: dict[str, Any],
    ) -> Manifest:
        """Write a rank's part of a checkpoint that is to be."""
        self.check_fence(generation)
        try:
            return write_part(self.store, self.commits.writing(generation, step), rank, given, facts, numbers)
        except FileNotFoundError:
            raise Fenced(f"generation {generation} may not write step {step}: it was taken away from it") from None

    def fence(self, generation: int) -> None:
        """From now on only this generation commits: what older ones were writing is taken away from them."""
        self.commits.fence(generation)

    def check_fence(self, generation: int) -> None:
        self.commits.check(generation)

    def generation(self) -> int:
        """The newest generation that has begun to write here; 0 if none is known."""
        return self.commits.generation()

    def leftovers(self) -> list[str]:
        """What was being written when its generation ended, or is being written now."""
        return self.commits.unfinished()

    def gather(
        self, generation: int, step: int, ranks: range, patience: float, given_up: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait for the parts of some ranks and sum them up, for the one that commits."""
        folder = self.commits.writing(generation, step)
        found = self._summed(folder, [part_name(rank) for rank in ranks], patience, given_up)
        with self.store.write(f"{folder}/{group_name(ranks.start // FAN_OUT)}") as file:
            file.write(found.to_json())

    def commit(
        self, generation: int, step: int, world: int, patience: float, given_up: Callable[[], bool]
    ) -> Checkpoint:
        """Wait for what all ranks say, or those who sum it up, then make the checkpoint appear."""
        names = below(world)
        manifest = self._summed(self.commits.writing(generation, step), names, patience, given_up)
        check_sum(manifest)
        self.check_fence(generation)
        self.commits.commit(generation, step, manifest.to_json(), names)
        return self.open(step)

    def _summed(self, folder: str, names: Sequence[str], patience: float, given_up: Callable[[], bool]) -> Manifest:
        """What these files say together, once they are there."""
        deadline, found = time.monotonic() + patience, list[Child]()
        for name in names:
            pause = POLL_SECONDS
            while not self.store.there(f"{folder}/{name}"):
                if given_up() or time.monotonic() > deadline:
                    missing = [other for other in names if not self.store.there(f"{folder}/{other}")]
                    raise TimeoutError(f"{len(missing)} of {len(names)} parts are missing, {missing[0]} among them")
                time.sleep(pause)
                pause = min(SLOWEST_POLL_SECONDS, 1.5 * pause)
            content = _read(self.store, f"{folder}/{name}")
            part = Manifest.parse(content, f"{self.store.url}/{folder}/{name}")
            found.append(Child(name, part, digest(content)))
            ends: dict[str, int] = {}
            for held in part.tensors.values():
                for chunk in held.chunks:
                    ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.start + chunk.length)
            for file, end in ends.items():
                if self.store.size(f"{folder}/{file}") < end:
                    raise Damaged(f"{self.store.url}/{folder}/{file}", "is shorter than what was written to it")
        return summed(found)

    def abandon(self, generation: int, but: int | None = None) -> None:
        """Let go of what a generation has begun to write and will not finish: all but one step."""
        for folder in self.commits.unfinished(generation):
            if but is None or folder != self.commits.writing(generation, but):
                self.store.remove(folder)

    def close(self, generation: int) -> None:
        """A generation is done."""
        self.commits.close(generation)

    def set_aside(self, step: int, why: str = "damaged") -> str:
        """A checkpoint that is none any more, so that its step can be saved again; the new name of its folder."""
        names = (f"{why}-{name_of(step)}{f'-{count}' if count else ''}" for count in itertools.count())
        name = next(name for name in names if not self.store.exists(name))
        self.commits.take_out(step, name)
        return name

    def damaged(self) -> list[str]:
        """What was set aside."""
        return [name for name in self.store.names() if name.startswith(("damaged-", "distrusted-"))]

    def retain(self, step: int, last: int, every: int, sure: Iterable[int | None] = ()) -> list[int]:
        """After ``step`` was saved and read back: let go of older ones; tells which.

        Kept are the ``last`` so many up to it, those of every so many steps, the best by a measure, and the newest up
        to each of ``sure``: states that are known to be good. What is newer than the step was not gone on from, and is
        left alone.
        """
        steps = [known for known in self.steps() if known <= step]
        kept = {*steps[-last:], *(known for known in steps if every and known % every == 0)}
        kept |= {max((known for known in steps if good is not None and known <= good), default=step) for good in sure}
        kept |= {best.step} if (best := self.best()) is not None else set()
        gone = [known for known in steps if known not in kept]
        for known in gone:
            self.commits.take_out(known)
        return gone

    def best(self) -> Best | None:
        """The checkpoint that is the best by a measure; None if none was noted, or it is not there any more."""
        try:
            found = read_best(self.store)
        except Damaged:
            return None
        return found if found is not None and found.step in self.steps() else None

    def note_best(self, best: Best) -> None:
        """From now on this checkpoint is the best, and kept as long as it is."""
        write_best(self.store, best)

    def distrust(self, after: int) -> list[int]:
        """Put aside all checkpoints of later steps; tells which."""
        later = [step for step in self.steps() if step > after]
        for step in reversed(later):  # the newest first: it is the one that would be gone on from
            self.set_aside(step, "distrusted")
        return later


def _read(store: Store, file: str, start: int = 0, stop: int | None = None) -> bytes:
    """What cannot be read is damage; what may be there all the same is tried again first."""
    for attempt in range(ATTEMPTS):
        try:
            return store.read(file, start, stop)
        except OSError as error:
            if error.errno in FINAL or attempt + 1 == ATTEMPTS:
                raise unreadable(f"{store.url}/{file}", error) from None
            time.sleep(2.0**attempt / 4)
    raise AssertionError
