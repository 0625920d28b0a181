"""Streams as a data set: shards that are iterated, and which say how many samples they have.

Sample ``i`` is found by reading its shard from the beginning to there, and what was read last is kept. Training asks in
an order (`ShardOrder`) in which every shard is read forwards, a chunk at a time.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch.utils.data

from phalanx import streams
from phalanx.data.kinds import BrokenStream
from phalanx.data.seeding import seed_globally
from phalanx.data.shard_order import CHUNK, WINDOW, ShardOrder
from phalanx.errors import WrongUse, may_pass
from phalanx.events import say
from phalanx.files import EVERYBODYS, write_whole
from phalanx.words import many

END = object()


class Shards:
    """Samples of shards: iterables that can be iterated again and again, and give the same samples each time."""

    def __init__(
        self,
        shards: Sequence[Iterable[Any]],
        sizes: Sequence[int] | str | Path,
        *,
        chunk: int = CHUNK,
        window: int = WINDOW,
    ) -> None:
        """``sizes``: how many samples each shard has, or a JSON file of that, for which they are counted once.

        In training ``window`` shards are read side by side, ``chunk`` samples of each at a time; twice as many are kept
        in memory, by each rank, or each of its workers.
        """
        if not len(shards):
            raise WrongUse("Shards() has no shards. Give a list of what can be iterated.")
        if chunk < 1 or window < 1:
            raise WrongUse(f"chunk={chunk} and window={window} must be 1 or more. Leave them out, or raise them.")
        self.shards, self.chunk, self.window = shards, chunk, window
        self.sizes = _counted(shards, Path(sizes)) if isinstance(sizes, str | Path) else [int(size) for size in sizes]
        if len(self.sizes) != len(shards) or min(self.sizes) < 0:
            raise WrongUse(
                f"sizes has {many(len(self.sizes), 'number')} for {many(len(shards), 'shard')}. Give one from 0 up for "
                "each, or the name of a file to count them into."
            )
        self._before = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)
        self._forget()

    @classmethod
    def of(
        cls, stream: Any, sizes: int | Sequence[int] | str | Path, *, chunk: int = CHUNK, window: int = WINDOW
    ) -> Shards:
        """Of a stream that divides itself, as Hugging Face's do; or, by one number, of one that is read as a whole."""
        if isinstance(sizes, int):
            return cls([stream], [sizes], chunk=chunk, window=window)
        count = getattr(stream, "num_shards", None)
        if not isinstance(count, int) or not hasattr(stream, "shard"):
            raise WrongUse(
                f"a {type(stream).__name__} does not say how it divides into shards. Give them as a list: "
                "phalanx.data.Shards([...], sizes), or say how many samples it has: Shards.of(stream, 1000)"
            )
        shards = [stream.shard(num_shards=count, index=index) for index in range(count)]
        return cls(shards, sizes, chunk=chunk, window=window)

    def __len__(self) -> int:
        return int(self._before[-1])

    def training_order(self, global_batch: int, seed: int) -> ShardOrder:
        sizes = tuple(self.sizes)
        return ShardOrder(len(self), global_batch, seed, sizes=sizes, chunk=self.chunk, window=self.window)

    def near(self, index: int) -> int:
        """A sample near another one that is read soon: the first of its shard."""
        return int(self._before[self._shard(index)])

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = self._shard(index)
        chunk, place = divmod(index - int(self._before[shard]), self.chunk)
        sample = self._read(shard, chunk)[place]
        return dict(sample) if isinstance(sample, Mapping) else sample

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_open", "_kept")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def _shard(self, index: int) -> int:
        return int(np.searchsorted(self._before, index, side="right")) - 1

    def _forget(self) -> None:
        self._open: OrderedDict[int, tuple[Iterator[Any], int]] = OrderedDict()
        """Shards that are being read, and which chunk comes next."""
        self._kept: OrderedDict[tuple[int, int], list[Any]] = OrderedDict()
        self._process = os.getpid()

    def _read(self, shard: int, chunk: int) -> list[Any]:
        """A chunk of a shard: kept from before, or read on to from where the shard stands."""
        if self._process != os.getpid():  # what another process opened is its own
            self._forget()
        if (shard, chunk) not in self._kept:
            reader, coming = self._open.pop(shard, (None, 0))
            if reader is None or coming > chunk:
                reader, coming = self._begun(shard), 0
            for number in range(coming, chunk + 1):
                found = self._next(reader, shard, number)
            self._put(self._kept, (shard, chunk), found)
            self._put(self._open, shard, (reader, chunk + 1))
        self._kept.move_to_end((shard, chunk))
        return self._kept[shard, chunk]

    def _put(self, known: OrderedDict[Any, Any], key: Any, value: Any) -> None:
        known[key] = value
        while len(known) > 2 * self.window:  # a batch may end one round and begin the next
            known.popitem(last=False)

    def _begun(self, shard: int) -> Iterator[Any]:
        with _undivided():
            return iter(self.shards[shard])

    def _next(self, reader: Iterator[Any], shard: int, chunk: int) -> list[Any]:
        """The next chunk; what is drawn while it is read follows from the places of its samples."""
        found: list[Any] = []
        size, first = self.sizes[shard], chunk * self.chunk
        with _undivided():
            for place in range(first, min(first + self.chunk, size)):
                seed_globally("shard", shard, place)
                sample = _taken(reader, shard, place)
                if sample is END:
                    raise BrokenStream(
                        f"shard {shard} ends after {many(place, 'sample')}, and should have {size:,}. Give its size as "
                        "it is; and a stream that divides itself by get_worker_info() must not do so."
                    )
                found.append(sample)
            if first + self.chunk >= size and _taken(reader, shard, size) is not END:
                raise BrokenStream(f"shard {shard} has more than {many(size, 'sample')}. Give its size as it is.")
        return found


def _taken(reader: Iterator[Any], shard: int, place: int) -> Any:
    """The next sample of a shard. After an error it has no others: it ends the run, whatever becomes of bad rows."""
    try:
        return next(reader, END)
    except Exception as error:
        if may_pass(error):
            raise
        where = f"sample {place} of shard {shard} cannot be read, and so none after it"
        raise BrokenStream(f"{where}: {type(error).__name__}: {error}. Have the stream leave it out.") from error


def _counted(shards: Sequence[Iterable[Any]], path: Path) -> list[int]:
    """How many samples each shard has: from a file, or by reading all of them once."""
    try:
        return [int(size) for size in json.loads(path.read_text())]
    except FileNotFoundError:
        say(f"   note  {path} is not there: counting the samples of {many(len(shards), 'shard')}", streams.stderr())
    except (ValueError, TypeError) as error:
        raise WrongUse(f"{path} is no list of numbers ({error}). Remove it, and they are counted again.") from None
    with _undivided():
        sizes = [sum(1 for _ in shard) for shard in shards]
    write_whole(path, json.dumps(sizes), EVERYBODYS)
    return sizes


@contextmanager
def _undivided() -> Iterator[None]:
    """While this lasts, streams that deal their samples out to a loader's workers see none: a worker reads it all."""
    known = torch.utils.data.get_worker_info
    torch.utils.data.get_worker_info = lambda: None
    try:
        yield
    finally:
        torch.utils.data.get_worker_info = known
