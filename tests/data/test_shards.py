"""Shards of a stream: the same samples at any number of ranks, with workers, from any step; wrong sizes are named."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx import WrongUse
from phalanx.data import Shards
from phalanx.data.kinds import BrokenStream
from phalanx.data.loader import Loader

SIZES = (7, 3, 0, 11)


class Shard:
    """Numbers that draw while they are read; ``opened`` counts how often one was begun."""

    opened = 0

    def __init__(self, number: int, size: int, fails: int = -1) -> None:
        self.number, self.size, self.fails = number, size, fails

    def __iter__(self) -> Iterator[dict[str, Any]]:
        Shard.opened += 1
        for place in range(self.size):
            if place == self.fails:
                raise ZeroDivisionError("a bad row")
            yield {"id": torch.tensor(100 * self.number + place), "noise": torch.tensor(random.random())}


def shards(chunk: int = 2, window: int = 2) -> Shards:
    return Shards([Shard(number, size) for number, size in enumerate(SIZES)], SIZES, chunk=chunk, window=window)


def read(ranks: int = 1, rank: int = 0, workers: int = 0, start: int = 0) -> list[tuple[int, int, float]]:
    data = shards()
    order = data.training_order(4, seed=1)
    loader = Loader(data, collate, order, micro_batches=1, ranks=ranks, rank=rank, workers=workers)
    return [
        (batch.step, int(i), float(n))
        for batch in loader.batches(start, 12)
        for micro in batch.micro_batches
        if micro.real
        for i, n in zip(micro.tensors["id"], micro.tensors["noise"], strict=True)
    ]


def collate(samples: Any) -> dict[str, Any]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def test_samples_are_found_by_number() -> None:
    data = shards()
    every = [100 * number + place for number, size in enumerate(SIZES) for place in range(size)]
    assert len(data) == len(every)
    for index in (20, 3, 4, 0, 20, 10, 9):
        assert int(data[index]["id"]) == every[index]
    assert [data.near(index) for index in (0, 6, 7, 12, 20)] == [0, 0, 7, 10, 10]
    with pytest.raises(IndexError):
        data[21]


def test_ranks_workers_and_resumes_read_the_same() -> None:
    whole = read()
    assert len({i for step, i, _ in whole if step < 6}) == sum(SIZES)
    for ranks in (2, 3):
        assert sorted(item for rank in range(ranks) for item in read(ranks, rank)) == sorted(whole)
    assert read(workers=2) == whole
    assert read(start=7) == [item for item in whole if item[0] >= 7]


def test_an_epoch_opens_each_shard_once() -> None:
    Shard.opened = 0
    data = shards()
    order = data.training_order(4, seed=1)
    for step in range(order.steps_per_epoch):
        for index in order.ids(step).tolist():
            data[index]
    assert Shard.opened == sum(size > 0 for size in SIZES)


def test_a_size_that_is_wrong_is_named() -> None:
    with pytest.raises(BrokenStream, match="shard 1 ends after 3 samples, and should have 4"):
        Shards([Shard(0, 5), Shard(1, 3)], [5, 4])[8]
    with pytest.raises(BrokenStream, match="shard 0 has more than 4 samples"):
        Shards([Shard(0, 5)], [4])[0]
    with pytest.raises(BrokenStream, match="sample 2 of shard 0 cannot be read, and so none after it: ZeroDivision"):
        Shards([Shard(0, 5, fails=2)], [5])[0]
    with pytest.raises(WrongUse, match="sizes has 1 number for 2 shards"):
        Shards([Shard(0, 5), Shard(1, 3)], [5])
    with pytest.raises(WrongUse, match="has no shards"):
        Shards([], [])
    with pytest.raises(WrongUse, match="chunk=0"):
        Shards([Shard(0, 5)], [5], chunk=0)


def test_sizes_are_counted_once_into_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sizes.json"
    parts = [Shard(0, 5), Shard(1, 3)]
    assert Shards(parts, path).sizes == [5, 3]
    assert "counting the samples of 2 shards" in capsys.readouterr().err
    assert json.loads(path.read_text()) == [5, 3]
    assert Shards(parts, str(path)).sizes == [5, 3]
    assert not capsys.readouterr().err
    path.write_text("{")
    with pytest.raises(WrongUse, match="is no list of numbers"):
        Shards(parts, path)


def rows(numbers: list[int]) -> Iterator[dict[str, int]]:
    for number in numbers:
        yield {"id": number}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_of_hugging_faces_is_read_shard_by_shard(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed (the dev extra has it)")
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "True")  # which it sets when it is first used
    stream = datasets.IterableDataset.from_generator(rows, gen_kwargs={"numbers": [*range(10)]})
    assert stream.num_shards == 10
    data = Shards.of(stream, tmp_path / "sizes.json", chunk=2)
    assert data.sizes == [1] * 10
    loader = Loader(
        data, lambda samples: {"id": torch.tensor([sample["id"] for sample in samples])},
        data.training_order(4, seed=1), micro_batches=1, ranks=1, rank=0, workers=workers,
    )  # fmt: skip
    found = [int(i) for batch in loader.batches(0, 3) for micro in batch.micro_batches for i in micro.tensors["id"]]
    assert sorted(found) == [*range(10)]
    whole = Shards.of(stream, 10)
    assert [whole[index]["id"] for index in (3, 9, 0)] == [3, 9, 0]
    with pytest.raises(WrongUse, match="does not say how it divides into shards"):
        Shards.of([1, 2], "sizes.json")
