"""Streaming: what comes from a store is what lies in the folder, each block about once, and a stall is named."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from phalanx import Task, WrongUse
from phalanx.data import PackedFiles, StreamedFiles, StreamedSamples, TokenFiles, streaming, token_manifest, tokenize
from phalanx.data.loader import Loader
from phalanx.data.streaming import BlockOrder
from phalanx.errors import may_pass

SMALL = 256


class Counted(MemoryFileSystem):
    """A store in memory that counts what is read, and stalls when it is told to."""

    protocol = "counted"
    read: list[tuple[str, int | None]] = []  # noqa: RUF012
    stalled: threading.Event | None = None

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("counted://").strip("/")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: object) -> bytes:
        self.read.append((path.rpartition("/")[2], start))
        if self.stalled is not None:
            self.stalled.wait(20)
        return super().cat_file(path, start, end, **options)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (streaming, token_manifest):
        monkeypatch.setattr(module, "BLOCK_BYTES", SMALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    texts = [f"document {i} " * (i % 9 + 1) for i in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenize([tmp_path / "a.jsonl"], tmp_path / "out", "bytes", workers=0, part_bytes=500, shard_tokens=900)
    return tmp_path / "out"


@pytest.fixture
def store(folder: Path) -> Iterator[str]:
    fsspec.register_implementation("counted", Counted, clobber=True)
    Counted.read, Counted.stalled = [], None
    copy(folder, fsspec.filesystem("counted"), "/tokens")
    yield "counted://tokens"
    MemoryFileSystem.store.clear()


def copy(folder: Path, fs: fsspec.AbstractFileSystem, root: str) -> None:
    for path in folder.iterdir():
        fs.pipe_file(f"{root}/{path.name}", path.read_bytes())


def test_samples_are_those_of_the_folder_through_a_small_cache(folder: Path, store: str, tmp_path: Path) -> None:
    cache, most = tmp_path / "cache", 6 * SMALL
    streamed = StreamedSamples(StreamedFiles(store, cache, "bytes", cache_bytes=most), 16)
    here = PackedFiles(TokenFiles(folder), 16)
    order = streamed.training_order(8, seed=2)
    assert isinstance(order, BlockOrder)
    assert len(streamed) == len(here)
    for step in range(order.steps_per_epoch):
        for index in order.ids(step).tolist():
            assert all(torch.equal(column, here[index][name]) for name, column in streamed[index].items())
        assert sum(path.stat().st_size for path in cache.iterdir()) <= most
    for number in range(2):
        again = StreamedSamples(StreamedFiles(store, tmp_path / "large", cache_bytes=1 << 20), 16)
        before = len(Counted.read)
        assert torch.equal(again[3]["tokens"], here[3]["tokens"])
        assert (len(Counted.read) == before) == (number == 1), "a second process finds it in the cache"


def test_each_block_is_fetched_about_once_an_epoch(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "KEPT", 4)
    files = StreamedFiles(store, tmp_path / "cache", cache_bytes=12 * SMALL)
    samples = StreamedSamples(files, 8)
    order = BlockOrder(len(samples), 8, 1, block=SMALL // 16, window=4)
    Counted.read.clear()
    seen = [samples[int(i)]["tokens"] for step in range(order.steps_per_epoch) for i in order.ids(step)]
    tokens = [read for read in Counted.read if read[0].endswith("tokens")]
    assert len(seen) == len(samples)
    assert len(tokens) <= 2 * len(set(tokens)), "a sample may reach into the next block"


def test_a_block_order_visits_each_sample_once_by_any_number_of_ranks() -> None:
    order = BlockOrder(1003, 16, 5, block=10, window=8)
    epochs = [np.concatenate([order.ids(step + epoch * order.steps_per_epoch) for step in range(order.steps_per_epoch)])
              for epoch in range(2)]  # fmt: skip
    assert all(sorted(ids.tolist()) == list(range(1003)) for ids in epochs)
    assert epochs[0].tolist() != epochs[1].tolist()
    assert len(np.unique(epochs[0][:80] // 10)) <= 8, "so many blocks are read together"
    assert order.ids(3).tolist() == [*order.ids(3, 0, 5), *order.ids(3, 5, 16)]
    data = [{"x": index} for index in range(1003)]
    for ranks in (1, 3):
        loaders = [Loader(data, Task().collate, order, micro_batches=1, ranks=ranks, rank=r) for r in range(ranks)]
        batches = [next(loader.batches(7, 8)) for loader in loaders]
        assert [int(x) for b in batches for m in b.micro_batches for x in m.tensors["x"]] == order.ids(7).tolist()


@pytest.mark.parametrize(("size", "window"), [(100, 32), (1, 8), (10, 1), (25, 1), (103, 4), (109, 3), (110, 4)])
def test_samples_after_the_last_whole_block_are_shuffled_too(size: int, window: int) -> None:
    ends = []
    for seed in range(12):
        ids = BlockOrder(size, size, seed, block=10, window=window).ids(0)
        assert sorted(ids.tolist()) == list(range(size))
        places = [np.flatnonzero(ids // 10 == block) for block in range(-(-size // 10))]
        assert all(found.max() - found.min() < 10 * window for found in places), "a block is read at one time"
        ends.append(tuple(places[-1].tolist()))
    assert size <= 10 or len(set(ends)) > 1


def test_less_than_a_block_is_in_another_order_each_epoch() -> None:
    order = BlockOrder(100, 10, 0, block=16384)
    epochs = [np.concatenate([order.ids(10 * epoch + step) for step in range(10)]).tolist() for epoch in range(2)]
    assert [sorted(ids) for ids in epochs] == [list(range(100))] * 2
    assert len({tuple(ids) for ids in [*epochs, range(100)]}) == 3


def test_parts_kept_apart_are_read_block_by_block_too(store: str, tmp_path: Path) -> None:
    samples = StreamedSamples(StreamedFiles(store, tmp_path / "cache", cache_bytes=1 << 20), 16)
    for part in samples.apart(0.2):
        assert isinstance(part.training_order(1, seed=0), BlockOrder)


def test_a_cache_that_takes_nothing_loses_no_block(
    folder: Path, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = StreamedSamples(StreamedFiles(store, tmp_path / "cache", cache_bytes=1 << 20), 16)

    def full(path: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.warns(UserWarning, match="does not take a block: .*No space left"):
        found = samples[0]["tokens"]
    assert torch.equal(found, PackedFiles(TokenFiles(folder), 16)[0]["tokens"])
    assert not list((tmp_path / "cache").iterdir())


def test_what_another_process_writes_is_left_to_it(store: str, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    written, abandoned = tmp_path / "cache" / "a.1234", tmp_path / "cache" / "b.1234"
    for path in (written, abandoned):
        path.write_bytes(b"x" * SMALL)
    os.utime(abandoned, (0, 0))
    samples = StreamedSamples(StreamedFiles(store, tmp_path / "cache", cache_bytes=4 * SMALL), 16)
    for index in range(len(samples)):
        samples[index]
    assert written.exists()
    assert not abandoned.exists()


def test_the_ends_of_few_shards_are_kept(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "KEPT", 2)
    files = StreamedFiles(store, tmp_path / "cache", cache_bytes=1 << 20)
    assert len(files.manifest.shards) == 4
    for number in range(0, len(files), 50):
        files.window(number, min(number + 50, len(files)))
    assert len(files._known_ends) + len(files._arrays) == 2


def test_a_store_that_stalls_is_named_and_nothing_is_lost(folder: Path, store: str, tmp_path: Path) -> None:
    samples = StreamedSamples(StreamedFiles(store, tmp_path / "cache", deadline=0.2, cache_bytes=1 << 20), 16)
    Counted.stalled = threading.Event()
    with pytest.raises(TimeoutError, match=r"tokens stalls: bytes 0 to \d+ of shard-00000\.tokens did not") as e:
        samples[0]
    assert may_pass(e.value), "a run goes on by itself"
    Counted.stalled.set()
    Counted.stalled = None
    assert torch.equal(samples[0]["tokens"], PackedFiles(TokenFiles(folder), 16)[0]["tokens"])


def test_what_is_not_what_was_written_is_refused(store: str, tmp_path: Path) -> None:
    fs = fsspec.filesystem("counted")
    fs.pipe_file("/tokens/shard-00000.tokens", b"\1" + fs.cat_file("/tokens/shard-00000.tokens")[1:])
    samples = StreamedSamples(StreamedFiles(store, tmp_path / "cache", cache_bytes=1 << 20), 16)
    with pytest.raises(WrongUse, match=r"shard-00000\.tokens, between bytes 0 and 256, is not what was written"):
        samples[0]
    with pytest.raises(WrongUse, match="Make it with phalanx tokenize"):
        StreamedFiles("counted://none", tmp_path / "cache")
    with pytest.raises(WrongUse, match="holds no two blocks"):
        StreamedFiles(store, tmp_path / "cache", cache_bytes=3)
