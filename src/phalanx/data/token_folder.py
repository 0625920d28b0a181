"""Documents to a folder of token files, by several processes: ``phalanx tokenize``.

Sources are cut into parts that do not depend on how many processes there are. Workers encode parts into files of an
unfinished folder beside the output; this process joins them in order into shards. Whatever ends it, what was encoded
is taken up by the next run, and the folder appears under its name by one rename, whole.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.data.encoding import NAMED, Encoder, PartRecord, closes
from phalanx.data.rows import FilePart, files_of, parts_of
from phalanx.data.token_manifest import ENDS, MANIFEST, BlockHash, Progress, ShardRecord, TokenManifest
from phalanx.data.tokenizer import BYTES, FILE, Tokenizer, file_of, on_one_thread
from phalanx.errors import CannotHere, WrongUse
from phalanx.files import EVERYBODYS, sync_folder, write_whole
from phalanx.processes import die_with_parent
from phalanx.run import FolderHeld, held
from phalanx.task import BadRows

PART_BYTES = 8 << 20
SHARD_TOKENS = 1 << 27
CLAIM = "made.json"
"""Says what an unfinished folder is made from."""
ENDING_SECONDS = 5.0
"""So long workers of a process that was killed may still hold its folder."""
AHEAD = 4
"""Parts a worker that are asked for before the first of them is joined to a shard."""


def tokenize(
    inputs: Sequence[str | Path],
    output: str | Path,
    tokenizer: str | Path,
    *,
    field: str = "text",
    end: str | None = None,
    workers: int | None = None,
    bad_rows: BadRows = "stop",
    shard_tokens: int = SHARD_TOKENS,
    part_bytes: int = PART_BYTES,
    patience: float = 0.0,
    progress: Progress | None = None,
) -> TokenManifest:
    """Encode documents into a folder of token files, or go on where an earlier call was ended; returns its manifest.

    A folder that was made so is left as it is; one that was made otherwise is refused. ``workers``: processes, by
    default one a core; 0 encodes in this one. ``patience``: seconds to wait for another process that does the same.
    """
    output = Path(output)
    model = Tokenizer.load(tokenizer, end)
    files = files_of(inputs)
    if not files:
        raise WrongUse("there is nothing to tokenize. Name files or folders before the output folder.")
    if len(files) > len({path.resolve() for path in files}):
        raise WrongUse("a file is named twice among the inputs. Name each once.")
    if workers is not None and workers < 0:
        raise WrongUse(f"{workers} workers cannot be. Give 1 or more, or 0 for none beside this process.")
    sources = [{"name": name, "bytes": path.stat().st_size} for name, path in _names(inputs, files)]
    made = {
        "tokenizer": {"name": model.name, "hash": model.hash, "vocabulary": model.vocabulary, "end": model.end_token},
        "field": field, "shard_tokens": shard_tokens, "part_bytes": part_bytes, "sources": sources,
    }  # fmt: skip
    if (known := _whole(output, made, files)) is not None:
        return known
    with _unfinished(output, patience) as folder:
        if (known := _whole(output, made, files)) is not None:  # another process was first
            shutil.rmtree(folder, ignore_errors=True)
            return known
        _claim(folder, made, files)
        manifest = TokenManifest.read(folder)
        if manifest is None:
            parts = [part for path in files for part in parts_of(path, part_bytes)]
            work = Tokenizing(Encoder(model, parts, field, bad_rows == "skip", folder), shard_tokens, progress)
            work.run(len(os.sched_getaffinity(0)) if workers is None else workers)
            manifest = _manifest(work, made, files)
            if str(tokenizer) != BYTES:
                shutil.copyfile(file_of(tokenizer), folder / FILE)
            write_whole(folder / MANIFEST, manifest.to_json(), EVERYBODYS)
        _commit(folder, output)
    return manifest


def _commit(folder: Path, output: Path) -> None:
    """Have a folder that is whole appear under its name."""
    for path in folder.glob("shard-*.json"):
        path.unlink()
    os.rename(folder, output)  # over an empty folder too
    for name in (CLAIM, "lock"):
        (output / name).unlink(missing_ok=True)
    sync_folder(output.parent)


@dataclass
class OpenShard:
    """A shard that is being written: its two files, and their hashes."""

    name: str
    first: int
    """The first part in it."""
    tokens: int
    documents: int
    hashes: dict[str, BlockHash]


class Tokenizing:
    """Parts encoded by workers and joined into shards, from where the folder stands."""

    def __init__(self, encoder: Encoder, shard_tokens: int, progress: Progress | None) -> None:
        self.encoder, self.shard_tokens, self.progress = encoder, shard_tokens, progress
        self.shards: list[ShardRecord] = []
        self.records: list[PartRecord] = []
        """Of all parts that are in shards, in order."""
        self._shard: OpenShard | None = None
        self._sizes = _sizes(encoder.parts)
        self._began, self._done, self._tokens = time.monotonic(), 0, 0
        self._take_up()

    def run(self, workers: int) -> None:
        """Encode and join what is left."""
        left = range(len(self.records), len(self.encoder.parts))
        if not workers or not left:
            for number in left:
                self._join(number, self.encoder.known(number) or self.encoder.encode(number))
        else:
            self._shared(iter(left), workers)
        self._close()

    def _shared(self, left: Iterator[int], workers: int) -> None:
        pool = ProcessPoolExecutor(
            workers, get_context("fork"), initializer=_begin, initargs=(self.encoder,)
        )  # fmt: skip
        asked: list[tuple[int, Future[PartRecord]]] = []
        try:
            for number in left:
                asked.append((number, pool.submit(_encode, number)))
                if len(asked) >= AHEAD * workers:
                    self._join(asked[0][0], asked.pop(0)[1].result())
            while asked:
                self._join(asked[0][0], asked.pop(0)[1].result())
        except BrokenProcessPool:
            raise CannotHere(
                "a worker was killed, perhaps since memory ran out. What was encoded is kept: run it again, with fewer "
                "--workers."
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)

    def _join(self, number: int, record: PartRecord) -> None:
        """Add a part to the shard that is open, and close that where it is full and a document has ended."""
        ids, ends = self.encoder.arrays(number)
        shard = self._shard or self._open(number)
        with (self.encoder.folder / f"{shard.name}.tokens").open("ab") as file:
            file.write(ids.data)
        with (self.encoder.folder / f"{shard.name}.ends").open("ab") as file:
            file.write((ends + shard.tokens).astype(ENDS).data)
        shard.hashes["tokens"].update(ids.data.cast("B") if len(ids) else memoryview(b""))
        shard.hashes["ends"].update(memoryview((ends + shard.tokens).astype(ENDS).tobytes()))
        shard.tokens, shard.documents = shard.tokens + len(ids), shard.documents + len(ends)
        self.records.append(record)
        self._tell(number, len(ids))
        part = self.encoder.parts[number]
        if shard.tokens >= self.shard_tokens and (part.kind != "text" or closes(part)):
            self._close()

    def _open(self, first: int) -> OpenShard:
        name = f"shard-{len(self.shards):05d}"
        for ending in ("tokens", "ends"):
            (self.encoder.folder / f"{name}.{ending}").write_bytes(b"")
        self._shard = OpenShard(name, first, 0, 0, {"tokens": BlockHash(), "ends": BlockHash()})
        return self._shard

    def _close(self) -> None:
        """Have the open shard on disk; its parts go."""
        shard, self._shard = self._shard, None
        if shard is None:
            return
        folder, parts = self.encoder.folder, range(shard.first, len(self.records))
        files = {ending: found.done() for ending, found in shard.hashes.items()}
        for ending in files:
            with (folder / f"{shard.name}.{ending}").open("rb") as file:
                os.fsync(file.fileno())
        record = ShardRecord(shard.name, shard.tokens, shard.documents, files)
        self.shards.append(record)
        known = {"shard": asdict(record), "parts": [asdict(self.records[number]) for number in parts]}
        write_whole(folder / f"{shard.name}.json", json.dumps(known), EVERYBODYS)
        for number in parts:
            self.encoder.forget(number)

    def _take_up(self) -> None:
        """Shards that were closed before, as long as each follows the one before it."""
        while (path := self.encoder.folder / f"shard-{len(self.shards):05d}.json").is_file():
            try:
                found = json.loads(path.read_bytes())
                record = ShardRecord.parse(found["shard"])
                parts = [PartRecord(**each) for each in found["parts"]]
            except (ValueError, KeyError, TypeError, RecursionError):
                return
            self.shards.append(record)
            for number in range(len(self.records), len(self.records) + len(parts)):
                self.encoder.forget(number)
                self._done += self._sizes[number]
            self.records += parts

    def _tell(self, number: int, tokens: int) -> None:
        self._done, self._tokens = self._done + self._sizes[number], self._tokens + tokens
        if self.progress is not None:
            rate = self._tokens / max(time.monotonic() - self._began, 1e-9)
            self.progress(f"tokenizing, {rate / 1e6:.2f} M tokens a second", self._done, sum(self._sizes))


_encoder: Encoder | None = None
"""In a worker, what it encodes with."""


def _begin(encoder: Encoder) -> None:
    global _encoder
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started it ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    on_one_thread()
    _encoder = encoder


def _encode(number: int) -> PartRecord:
    assert _encoder is not None
    return _encoder.known(number) or _encoder.encode(number)


def _sizes(parts: Sequence[FilePart]) -> list[int]:
    """About how many bytes of its file each part is."""
    count = Counter(part.path for part in parts)
    return [part.path.stat().st_size // count[part.path] for part in parts]


def _names(inputs: Sequence[str | Path], files: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Each file's name, in the folder that was given if one was."""
    roots = [Path(each).resolve().parent for each in inputs]
    for path in files:
        root = next(root for root in roots if path.resolve().is_relative_to(root))
        yield str(path.resolve().relative_to(root)), path


def _whole(output: Path, made: dict[str, Any], files: Sequence[Path]) -> TokenManifest | None:
    """The manifest of what is there already, if it was made the same way."""
    manifest = TokenManifest.read(output)
    if manifest is not None:
        _same(manifest.made, made, output)
        _unchanged(files, output / MANIFEST, output)
        return manifest
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise WrongUse(f"{output} holds other things than token files. Give a folder that is empty or not there.")
    return None


def _same(then: dict[str, Any], now: dict[str, Any], where: Path) -> None:
    """Refuse a folder that is made from something else."""
    then, now = _compared(then), _compared(now)
    other = next((name for name in now if then.get(name) != now[name]), None)
    if other is None:
        return
    words = {
        "tokenizer": "with another tokenizer", "sources": "from other inputs", "field": "from another field"
    }.get(other, f"with another {other}")  # fmt: skip
    raise WrongUse(f"{where} is made {words}. Give another folder, or remove that one.")


def _compared(made: dict[str, Any]) -> dict[str, Any]:
    """What a folder is made from, without the tokenizer's name: the same one may lie elsewhere."""
    return {**made, "tokenizer": {name: fact for name, fact in made["tokenizer"].items() if name != "name"}}


def _unchanged(files: Sequence[Path], made: Path, where: Path) -> None:
    """Refuse sources that were written after the folder was begun."""
    for path in files:
        if path.stat().st_mtime_ns > made.stat().st_mtime_ns:
            raise WrongUse(f"{path} was changed after {where} was begun. Remove that folder, or give another.")


def _claim(folder: Path, made: dict[str, Any], files: Sequence[Path]) -> None:
    """Say what an unfinished folder is made from, or see that it is this."""
    path = folder / CLAIM
    if not path.is_file():
        write_whole(path, json.dumps(made), EVERYBODYS)
        return
    _same(json.loads(path.read_bytes()), made, folder)
    _unchanged(files, path, folder)


@contextmanager
def _unfinished(output: Path, patience: float) -> Iterator[Path]:
    """The folder that an output is made in, which is nobody else's meanwhile."""
    folder = output.with_name(f"{output.name}.unfinished")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with held(folder, max(patience, ENDING_SECONDS)):
            folder.mkdir(exist_ok=True)  # another process may have finished it while this one waited
            yield folder
    except FolderHeld as error:
        advice = "Wait for it, stop it, or give another folder."
        raise WrongUse(f"{folder} is being written by {error.holder}. {advice}") from None


def _manifest(work: Tokenizing, made: dict[str, Any], files: Sequence[Path]) -> TokenManifest:
    tokens, records = sum(shard.tokens for shard in work.shards), work.records
    sources: list[dict[str, Any]] = []
    for source, path in zip(made["sources"], files, strict=True):
        own = [r for r, part in zip(records, work.encoder.parts, strict=True) if part.path == path]
        sources.append({**source, "tokens": sum(r.tokens for r in own), "documents": sum(r.documents for r in own)})
    if tokens < 2:
        bad = sum(record.bad for record in records)
        advice = f"{bad} bad rows were left out. " if bad else ""
        raise WrongUse(f"there is no text in {', '.join(str(path) for path in files[:4])}. {advice}Check the inputs.")
    named = [row for record in records for row in record.bad_rows]
    return TokenManifest(
        made, str(np.dtype(work.encoder.tokenizer.dtype).newbyteorder("=")), tokens, sum(r.documents for r in records),
        sum(r.empty for r in records), sum(r.bad for r in records), named[:NAMED], sources, work.shards,
    )  # fmt: skip
