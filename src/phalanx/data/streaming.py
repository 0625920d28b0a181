"""Token files in an object store, read block by block through a cache on this host.

A block is fetched when a sample needs it, checked against the manifest's hash, and kept in a folder of bounded size
that all ranks and workers of a host share; the loader's workers fetch ahead of the steps. `BlockOrder` has samples of a
few blocks come together, so that each block is fetched about once an epoch.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
import warnings
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from phalanx import counter
from phalanx.data.order import Order, permute
from phalanx.data.token_files import PackedFiles, TokenFiles
from phalanx.data.token_manifest import BLOCK_BYTES, ENDS, MANIFEST, TokenManifest, block_hash
from phalanx.data.tokenizer import Tokenizer
from phalanx.errors import WrongUse
from phalanx.redact import redact

DEADLINE_SECONDS = 120.0
CACHE_BYTES = 8 << 30
WINDOW = 32
"""Blocks whose samples are shuffled among each other."""
KEPT = 2 * WINDOW
"""Blocks that a process has open, in the cache or taken out of it since; of as many shards it knows the ends."""
ABANDONED_SECONDS = 600.0
"""After so long a block that was not written to its end is nobody's any more."""


class StreamedFiles(TokenFiles):
    """A folder that ``phalanx tokenize`` made, behind an fsspec URL such as ``s3://bucket/tokens``."""

    def __init__(
        self,
        url: str,
        cache: str | Path,
        tokenizer: str | Path | Tokenizer | None = None,
        *,
        cache_bytes: int = CACHE_BYTES,
        deadline: float = DEADLINE_SECONDS,
    ) -> None:
        """``cache``: a folder on this host, in which ``cache_bytes`` at most are kept.

        ``deadline``: seconds in which a block must have come; after that the store is said to stall.
        """
        if cache_bytes < 2 * BLOCK_BYTES:
            raise WrongUse(f"a cache of {cache_bytes:,} bytes holds no two blocks. Give {2 * BLOCK_BYTES:,} or more.")
        self.store = BlockCache(url, Path(cache), cache_bytes, deadline)
        self._open: OrderedDict[tuple[int, str, int], np.ndarray] = OrderedDict()
        self._known_ends: OrderedDict[int, np.ndarray] = OrderedDict()
        super().__init__(self.store.shown, tokenizer)

    def _manifest(self) -> TokenManifest | None:
        try:
            content = self.store.fetch(MANIFEST)
        except FileNotFoundError:
            return None
        return TokenManifest.parse(content, f"{self.store.shown}/{MANIFEST}")

    def _tokens(self, number: int, first: int, last: int) -> np.ndarray:
        size = self.dtype.itemsize
        found = self._bytes(number, "tokens", first * size, last * size).view(self.dtype).astype(np.int64)
        self._check_ids(number, found)
        return found

    def _ends(self, number: int) -> np.ndarray:
        if number not in self._known_ends:
            whole = self.manifest.shards[number].files["ends"].bytes
            self._known_ends[number] = self._checked_ends(number, self._bytes(number, "ends", 0, whole).view(ENDS))
            while len(self._known_ends) > KEPT:
                self._known_ends.popitem(last=False)
        self._known_ends.move_to_end(number)
        return self._known_ends[number]

    def _check_size(self, number: int, ending: str) -> None:
        """A block that is not what was written is refused when it comes."""

    def _bytes(self, number: int, ending: str, first: int, last: int) -> np.ndarray:
        """A copy of these bytes of a shard."""
        found = [np.zeros(0, np.uint8)]
        for block in range(first // BLOCK_BYTES, -(-last // BLOCK_BYTES)):
            begin = block * BLOCK_BYTES
            found.append(self._block(number, ending, block)[max(0, first - begin) : last - begin])
        return np.concatenate(found)

    def _block(self, number: int, ending: str, block: int) -> np.ndarray:
        place = number, ending, block
        if place not in self._open:
            shard = self.manifest.shards[number]
            file = shard.files[ending]
            stop = min((block + 1) * BLOCK_BYTES, file.bytes)
            self._open[place] = self.store.read(f"{shard.name}.{ending}", block * BLOCK_BYTES, stop, file.blocks[block])
            while len(self._open) > KEPT:
                self._open.popitem(last=False)
        self._open.move_to_end(place)
        return self._open[place]


class BlockCache:
    """Parts of files in a store, kept in a folder on this host under their hashes."""

    def __init__(self, url: str, cache: Path, most: int, deadline: float) -> None:
        self.url, self.cache, self.most, self.deadline = url.rstrip("/"), cache, most, deadline
        self.shown = redact(self.url)
        self._opened: tuple[int, Any, str] | None = None
        self.cache.mkdir(parents=True, exist_ok=True)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_opened": None}

    def read(self, name: str, start: int, stop: int, hash: str) -> np.ndarray:
        """Bytes of a file, whose hash is known; they lie in the cache."""
        path = self.cache / hash
        with suppress(OSError, ValueError):  # it is not there, or empty
            found = np.memmap(path, np.uint8, "r")
            if block_hash(found.data) == hash:
                os.utime(path)  # it was used last
                return found
        content = self.fetch(name, start, stop)
        if block_hash(content) != hash:
            where = f"{self.shown}/{name}, between bytes {start:,} and {stop:,},"
            raise WrongUse(f"{where} is not what was written. Copy the folder there again.")
        self._keep(path, content)
        return np.frombuffer(content, np.uint8)

    def fetch(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes of a file from the store; one that stalls is named after the deadline."""
        fs, root = self._open()
        found: list[Any] = []

        def get() -> None:
            try:
                found.append(fs.cat_file(f"{root}/{name}", start=start or None, end=stop))
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=get, daemon=True, name=f"fetch {name}")
        thread.start()
        thread.join(self.deadline)
        if not found:
            self._opened = None  # what waits there is not waited for again
            raise TimeoutError(
                f"{self.shown} stalls: bytes {start:,} to {stop or 'the end'} of {name} did not come in "
                f"{self.deadline:g} s. See to the store or the network; a run goes on by itself when they come."
            )
        if isinstance(found[0], BaseException):
            raise found[0]
        return bytes(found[0])

    def _open(self) -> tuple[Any, str]:
        """The file system, opened by this process: those with threads of their own do not survive a fork."""
        if self._opened is None or self._opened[0] != os.getpid():
            try:
                fs, root = fsspec.core.url_to_fs(self.url, skip_instance_cache=True)
            except (ImportError, ValueError) as error:
                advice = "Install what it needs, or give a folder."
                raise WrongUse(f"{self.shown} cannot be opened: {redact(str(error))}. {advice}") from None
            self._opened = os.getpid(), fs, root
        return self._opened[1:]

    def _keep(self, path: Path, content: bytes) -> None:
        """Add a block to the cache, and take those away that were used longest ago where they are too many."""
        known = []
        for each in self.cache.iterdir():
            with suppress(FileNotFoundError):  # another process made room
                known.append((each.stat().st_mtime_ns, each.stat().st_size, each))
        size = sum(bytes_ for _, bytes_, _ in known) + len(content)
        abandoned = time.time_ns() - int(ABANDONED_SECONDS * 1e9)
        for used, bytes_, oldest in sorted(known):
            if size <= self.most:
                break
            if oldest.suffix and used > abandoned:  # another process writes it
                continue
            oldest.unlink(missing_ok=True)
            size -= bytes_
        unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        try:
            unfinished.write_bytes(content)
            unfinished.replace(path)
        except OSError as error:  # the block itself has come
            warnings.warn(f"the cache {self.cache} does not take a block: {error}. See to its disk.", stacklevel=2)
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)


class StreamedSamples(PackedFiles):
    """Samples of token files in a store, trained on in an order that reads them block by block."""

    def training_order(self, global_batch: int, seed: int) -> Order:
        block = max(1, BLOCK_BYTES // (self.files.dtype.itemsize * self.length))
        return BlockOrder(len(self), global_batch, seed, block=block)


@dataclass(frozen=True)
class BlockOrder(Order):
    """Blocks in a keyed order, and the samples of every ``window`` blocks shuffled among each other.

    As `Order`, a pure function of (seed, step, slot), in which each epoch visits each sample once.
    """

    block: int = 1
    """Samples of a block."""
    window: int = WINDOW

    def facts(self) -> dict[str, Any]:
        return {"block": self.block, "window": self.window} | super().facts()

    def ids(self, step: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The sample ids in slots ``start:stop`` of a step."""
        stop = self.slots(step) if stop is None else stop
        position = step % self.steps_per_epoch * self.global_batch + np.arange(start, stop, dtype=np.int64)
        epoch, whole = self.epoch(step), self.window * self.block
        turn, missing = self._last_turn(epoch), self._count * self.block - self.size
        own, later = turn // self.window, (position + missing) // whole
        windows = np.where(later > own, later, position // whole)  # that of the last block is as short as it
        places = np.empty_like(position)
        """Among all samples of the epoch, laid block after block."""
        for number in np.unique(windows).tolist():
            here, first = windows == number, number * whole - missing * (number > own)
            size = min(whole, self._count * self.block - number * whole) - missing * (number == own)
            places[here] = first + permute(
                position[here] - first, size, counter.key(self.seed, "window", epoch, number)
            )
        places += missing * (places >= (turn + 1) * self.block - missing)  # as if the last block were whole
        return self._at(places // self.block, epoch) * self.block + places % self.block

    @property
    def _count(self) -> int:
        """How many blocks there are; the last one may have fewer samples than the others."""
        return -(-self.size // self.block)

    def _last_turn(self, epoch: int) -> int:
        """When the last block comes in an epoch."""
        return int(permute(np.zeros(1), self._count, counter.key(self.seed, "last block", epoch))[0])

    def _at(self, turns: np.ndarray, epoch: int) -> np.ndarray:
        """Which blocks come at these turns of an epoch."""
        turn, others = self._last_turn(epoch), max(1, self._count - 1)
        index = np.minimum(turns - (turns > turn), others - 1)  # among the others
        blocks = permute(index, others, counter.key(self.seed, "blocks", epoch))
        return np.where(turns == turn, self._count - 1, blocks)
