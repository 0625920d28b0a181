"""What a data set looks like, and whether it still does."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import torch

from phalanx.data.fingerprint import SAMPLES, Fingerprint, digest


def of(samples: list[Any]) -> Fingerprint:
    return Fingerprint.of(len(samples), samples.__getitem__)


def test_the_same_data_has_the_same_and_other_data_another() -> None:
    data = [{"x": torch.tensor([float(i)]), "name": str(i)} for i in range(100)]
    known = of(data)
    assert len(known.samples) == SAMPLES
    assert known == of(list(data)) == Fingerprint.parse(vars(known))
    assert known.others(of(data)) == ([], SAMPLES)
    others, looked = known.others(of(data[::-1]))
    assert len(others) == looked == SAMPLES
    last = [*data[:-1], {"x": torch.tensor([-1.0]), "name": "99"}]
    assert known.others(of(last)) == ([99], SAMPLES)


def test_small_data_and_data_that_cannot_be_read() -> None:
    assert of([]).samples == {}
    assert list(of([{"x": 1}]).samples) == ["0"]
    assert list(of([{"x": 1}, {"x": 2}]).samples) == ["1", "0"]
    assert Fingerprint.of(3, {}.__getitem__) == Fingerprint(3)
    for nothing in (None, [], 3, {}, {"samples": 3}):
        assert Fingerprint.parse(nothing) is None


def test_slow_data_is_looked_at_in_one_place_and_compared_there() -> None:
    def slowly(index: int) -> int:
        time.sleep(0.2)
        return index

    known = Fingerprint.of(1000, slowly)
    assert list(known.samples) == ["999"]
    assert known.others(Fingerprint.of(1000, lambda index: index)) == ([], 1)
    assert known.others(Fingerprint.of(1000, lambda index: -index)) == ([999], 1)


def test_data_that_is_never_the_same_is_known_as_such() -> None:
    count = itertools.count()
    assert not Fingerprint.of(10, lambda index: next(count)).repeatable


def test_contents_count_and_addresses_do_not() -> None:
    class Image:
        def __init__(self, value: int) -> None:
            self.value = value

        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            return np.full((2, 2), self.value)

    class Opaque:
        pass

    assert digest(Opaque()) == digest(Opaque())
    assert digest(Image(1)) == digest(Image(1)) != digest(Image(2))
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 2, "b": 1})
    assert digest(torch.ones(2, dtype=torch.bfloat16)) == digest(torch.ones(2, dtype=torch.bfloat16))
    assert digest(np.array(["a", "b"])) != digest(np.array(["a", "c"]))
    assert digest(np.array([{}], dtype=object)) == digest(np.array([{}], dtype=object))


def test_two_things_side_by_side_are_not_one() -> None:
    ones = torch.ones(2, 3)
    different: list[Any] = [
        (1, 11), (11, 1), [1, 23], [12, 3], ["ab", "c"], ["a", "bc"], [["a"], "b"], [["a", "b"]], {"a": "b"},
        {"ab": ""}, np.ones((3, 1)), np.ones(3),
        ones, ones.T, ones.flatten(), ones.double()[:, :1], torch.zeros(0), torch.zeros(0, 3),
    ]  # fmt: skip
    assert len({digest(value) for value in different}) == len(different)
