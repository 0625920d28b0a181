"""Each mistaken kind of data has a message of its own, which ends in the line to write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

import phalanx
from phalanx import WrongUse
from phalanx.data.kinds import check_rows, count_samples
from tests.tasks import Digits


class Formatted(list):
    """A data set of Hugging Face's, as far as it is looked at."""

    features = ()

    def with_format(self, kind: str) -> Any:
        raise AssertionError


class Frame:
    """One of pandas', as far as it is looked at."""

    columns = ("width", "label")

    def __len__(self) -> int:
        return 3


Frame.__name__ = "DataFrame"


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


class Sharded(Stream):
    """One of Hugging Face's, as far as it is looked at."""

    num_shards = 3


def generator() -> Iterator[dict[str, int]]:
    yield {"x": 1}


ARRAY = torch.ones(6, 2)
PAIRS = TensorDataset(ARRAY, torch.arange(6))


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"x": ARRAY, "y": ARRAY}, 'return phalanx.data.Arrays(x=columns["x"], y=columns["y"])'),
        (Frame(), 'return phalanx.data.Arrays(width=frame["width"].to_numpy(), label=frame["label"].to_numpy())'),
        ({"train": Formatted(), "test": Formatted()}, 'return data["train"].with_format("torch")'),
        (generator(), "return list(stream)"),
        (Stream(), "give it a __len__()"),
        (Sharded(), 'return phalanx.data.Shards.of(stream, "sizes.json")'),
        (ARRAY, "return phalanx.data.Arrays(x=data)"),
        ((ARRAY, ARRAY), "return phalanx.data.Arrays(x=x, y=y)"),
        ("data.csv", "phalanx.data.JsonLines(path)"),
        (None, "returned nothing. Return something with len()"),
        (7, "has no len()"),
        ([], "is empty: its len() is 0"),
        ({1, 2}, "has no [i]"),
    ],
)
def test_what_is_no_data_set(data: Any, line: str) -> None:
    with pytest.raises(WrongUse) as refused:
        count_samples(data, "Digits.data")
    assert line in str(refused.value)
    assert str(refused.value).startswith("Digits.data ")


def refused(data: Any, **settings: Any) -> str:
    class Given(Digits):
        def data(self) -> Any:
            return data

    with phalanx.Engine(Given(global_batch=4, **settings), device="cpu") as engine, pytest.raises(WrongUse) as found:
        list(engine.batches())
    return str(found.value)


def sample(**changes: Any) -> dict[str, Any]:
    return {"x": torch.ones(4), "y": 1} | changes


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_no_sample(workers: int) -> None:
    assert 'return phalanx.data.Named(dataset, "x", "y")' in refused(PAIRS, workers=workers)
    assert "(float32 [2], int64 []" in refused(PAIRS)
    lists = [sample(x=[1, 2, 3, 4])] * 4
    assert "x of sample" in refused(lists, workers=workers)
    assert 'return dataset.with_format("torch")' in refused(Formatted(lists))
    ragged = [sample(), sample(), sample(x=torch.ones(3)), sample()]
    assert "x of sample 2 is float32 [3]" in refused(ragged) or "of sample 2 float32 [3]" in refused(ragged)
    assert "one has 'z'" in refused([sample(), sample(z=1), sample(), sample()])
    assert "y of sample" in refused([sample(y=None)] * 4)
    assert "is a object, which does not stack" in refused([sample(y=object())] * 4)
    assert 'Name it: return phalanx.data.Arrays(x=data), or give {"x": ...}' in refused([1.0] * 4)


class Fails(list):
    def __getitem__(self, index: Any) -> Any:
        return {"x": torch.ones(4), "y": 1 // (index != 2)}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_raises_is_named(workers: int) -> None:
    class Given(Digits):
        def data(self) -> Any:
            return Fails([0] * 4)

    with (
        phalanx.Engine(Given(global_batch=4, workers=workers), device="cpu") as engine,
        pytest.raises(RuntimeError, match="sample 2 cannot be read: ZeroDivisionError") as found,
    ):
        next(engine.batches())
    assert 'return {"x": torch.ones(4), "y": 1 // (index != 2)}' in found.value.lines  # type: ignore[attr-defined]


def test_what_stacks_is_left_alone() -> None:
    class Nested(Digits):
        def data(self) -> Any:
            return [{"x": np.ones(4, np.float32), "y": 1, "parts": [torch.ones(2), torch.ones(3)], "name": "a"}] * 8

    with phalanx.Engine(Nested(), device="cpu") as engine:
        engine.step(next(engine.batches()))


def test_a_batch_without_some_of_its_samples_is_refused_and_a_packed_one_is_not() -> None:
    samples = [{"x": torch.ones(4), "y": n} for n in range(6)]
    check_rows({"x": torch.ones(6, 4), "y": torch.arange(6)}, samples)
    check_rows({"x": torch.ones(12, 4)}, samples)  # each twice
    check_rows({"x": torch.ones(2, 12), "y": torch.ones(2, 3)}, samples)  # three in a row
    check_rows({"x": torch.ones(1, 24)}, samples)
    check_rows({"nodes": torch.ones(5, 4), "edges": torch.ones(2, 9)}, samples)
    for rows in (5, 1):
        with pytest.raises(WrongUse, match=f"made {rows} rows? of 6 samples"):
            check_rows({"x": torch.ones(rows, 4), "y": torch.arange(rows)}, samples)
