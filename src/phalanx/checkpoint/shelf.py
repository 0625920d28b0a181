"""A run's checkpoints: written aside, committed at once, kept or let go, found again whole or not at all."""

from __future__ import annotations

import errno
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.commits import Fenced, commits_of, name_of
from phalanx.checkpoint.hashing import hashed
from phalanx.checkpoint.manifest import MANIFEST, Chunk, Damaged, Manifest, unreadable
from phalanx.checkpoint.read import Wanted, read
from phalanx.checkpoint.store import Store
from phalanx.checkpoint.write import Piece, check_file, write_part

POLL_SECONDS = 0.02
ATTEMPTS = 4
FINAL = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EINVAL, errno.ELOOP)
"""What trying again does not change."""


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint."""

    store: Store
    name: str
    manifest: Manifest

    @property
    def where(self) -> str:
        return f"{self.store.url}/{self.name}"

    def fetch(self, chunk: Chunk) -> Tensor:
        """A chunk, checked."""
        file = f"{self.name}/{chunk.file}"
        content = _read(self.store, file, chunk.start, chunk.start + chunk.length)
        content = chunk.checked(content, f"{self.store.url}/{file}")
        dtype = getattr(torch, self.manifest.tensors[chunk.tensor].dtype)
        return torch.frombuffer(bytearray(content), dtype=dtype).view(chunk.box.sizes)

    def read(self, wanted: Wanted) -> None:
        read(self.manifest.tensors, self.fetch, wanted)

    def tensor(self, name: str) -> Tensor:
        """A whole tensor."""
        held = self.manifest.tensors[name]
        for chunk in held.chunks:  # before memory is asked for
            file = f"{self.name}/{chunk.file}"
            try:
                if self.store.size(file) < chunk.start + chunk.length:
                    raise Damaged(f"{self.store.url}/{file}", f"is too short to hold {name}")
            except OSError as error:
                raise unreadable(f"{self.store.url}/{file}", error) from None
        whole = torch.empty(held.shape, dtype=getattr(torch, held.dtype))
        for chunk in held.chunks:
            spans = tuple(slice(a, a + n) for a, n in zip(chunk.box.offsets, chunk.box.sizes, strict=True))
            whole[spans] = self.fetch(chunk)
        return whole

    def verify(self, progress: Callable[[int], None] | None = None) -> Iterator[Damaged]:
        """Everything that is wrong with it: every byte read and checked, every tensor's hash made again."""
        for rank in range(self.manifest.facts["world"]):
            try:
                self._check_part(f"part-{rank:05d}")
            except Damaged as damage:
                yield damage
        for name, held in self.manifest.tensors.items():
            total = 0
            try:
                for chunk in held.chunks:
                    total += hashed(self.fetch(chunk), chunk.box, held.shape)
                    if progress is not None:
                        progress(chunk.length)
            except Damaged as damage:
                yield damage
                continue
            if total % (1 << 64) != held.hash:
                yield Damaged(f"{self.where}/{MANIFEST}", f"does not have the hash of {name} as it is")

    def _check_part(self, part: str) -> None:
        content = _read(self.store, f"{self.name}/{part}.json")
        described = Manifest.parse(content, f"{self.where}/{part}.json")
        check_file(self.store, f"{self.name}/{part}.safetensors", described)


class Shelf:
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

    def commit(
        self, generation: int, step: int, world: int, patience: float, given_up: Callable[[], bool]
    ) -> Checkpoint:
        """Wait for every rank's part, then make the checkpoint appear."""
        folder, deadline = self.commits.writing(generation, step), time.monotonic() + patience
        wanted = {f"part-{rank:05d}.json" for rank in range(world)}
        while missing := wanted - set(self.store.names(folder)):
            if given_up() or time.monotonic() > deadline:
                raise TimeoutError(f"{len(missing)} of {world} parts are missing, {min(missing)} among them")
            time.sleep(POLL_SECONDS)
        parts = [Manifest.parse(self.store.read(f"{folder}/{name}"), f"{folder}/{name}") for name in sorted(wanted)]
        manifest = Manifest.merged(parts)
        ends: dict[str, int] = {}
        for held in manifest.tensors.values():
            for chunk in held.chunks:
                ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.start + chunk.length)
        for file, end in ends.items():
            if self.store.size(f"{folder}/{file}") < end:
                raise Damaged(f"{self.store.url}/{folder}/{file}", "is shorter than what was written to it")
        self.check_fence(generation)
        self.commits.commit(generation, step, manifest.to_json(), ends)
        return self.open(step)

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

        Kept are the ``last`` so many up to it, those of every so many steps, and the newest up to each of ``sure``:
        states that are known to be good. What is newer than the step was not gone on from, and is left alone.
        """
        steps = [known for known in self.steps() if known <= step]
        kept = {*steps[-last:], *(known for known in steps if every and known % every == 0)}
        kept |= {max((known for known in steps if good is not None and known <= good), default=step) for good in sure}
        gone = [known for known in steps if known not in kept]
        for known in gone:
            self.commits.take_out(known)
        return gone

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
