"""Held-out samples that are trained on are found in data of any kind, however much there is; others are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, random_split

import phalanx
from phalanx.data import Arrays, Images, split
from phalanx.train.check import leak
from phalanx.train.check.leak import check_leak
from tests.tasks import Digits


class Slow:
    """Samples that are made when they are read."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.random.default_rng(self.start + index).normal(size=3)}


def arrays(count: int) -> Arrays:
    return Arrays(x=torch.randn(count, 3, generator=torch.Generator().manual_seed(0)), y=torch.arange(count) % 2)


def images(count: int) -> Images:
    pixels = np.random.default_rng(0).integers(0, 256, size=(count, 4, 4, 1), dtype=np.uint8)
    return Images(pixels, np.arange(count) % 2, augment=True)


@pytest.mark.parametrize("data", [arrays(3000), images(3000), Slow(0, 3000)], ids=["arrays", "images", "other"])
def test_a_division_made_twice(data: Any) -> None:
    parts = [random_split(data, [2400, 600], torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    with pytest.raises(phalanx.WrongUse, match=r"about \d+% of the held-out samples are also trained on.*data.split"):
        check_leak(Digits(), parts[0][0], parts[1][1])
    assert check_leak(Digits(), *parts[0]) == []
    assert check_leak(Digits(), *split(data, 600)) == []


def test_much_data_is_found_by_few() -> None:
    data = Slow(0, 40_000)
    with pytest.raises(phalanx.WrongUse, match="also trained on"):
        check_leak(Digits(), data, Subset(data, range(0, 40_000, 10)))


def test_a_few_of_many_are_said() -> None:
    data = arrays(3000)
    found = check_leak(Digits(), Subset(data, range(2000)), Subset(data, range(1980, 3000)))
    assert (
        "about 2% of the held-out samples are also trained on: sample 0 of Digits.held_out is sample 1980" in found[0]
    )


def test_what_is_often_the_same_is_not_taken_for_more_than_it_is() -> None:
    """Empty lines of a text, of which few samples were looked at."""
    text = [{"x": -1 if number % 150 == 0 else number} for number in range(60_000)]
    assert check_leak(Digits(), text[:50_000], text[50_000:]) == []


def test_nothing_held_out() -> None:
    assert check_leak(Digits(), arrays(10), None) == []
    assert check_leak(Digits(), arrays(10), Subset(arrays(10), [])) == []


def test_signs_and_places_tell_rows_apart() -> None:
    x = torch.tensor([[1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0], [1.0, 1.0]])
    data = Arrays(x=x.repeat_interleave(8, 0) * torch.arange(1, 33)[:, None])
    assert check_leak(Digits(), data, Arrays(x=-data.columns["x"].flip(1) * 3)) == []


def test_arrays_are_compared_with_arrays_of_which_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = arrays(3000)
    held_out = Arrays(**{name: column[:600] for name, column in whole.columns.items()})
    monkeypatch.setattr(leak, "MOST_ROWS", 2000)
    with pytest.raises(phalanx.WrongUse, match="of the held-out samples are also trained on"):
        check_leak(Digits(), whole, held_out)
