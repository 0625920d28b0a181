"""The largest micro-batch: found with few tries, within what is asked for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from phalanx import Layout, WrongUse
from phalanx.train.batch_search import Fitting, Search, bytes_of, largest_that_fits, search
from phalanx.train.options import Options
from phalanx.train.resolving import job_of
from tests.tasks import Digits


@pytest.mark.parametrize("most", [1, 2, 3, 7, 64, 1000])
@pytest.mark.parametrize("largest", [0, 1, 2, 3, 5, 63, 64, 999, 5000])
def test_it_is_found_with_few_tries(largest: int, most: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        assert 1 <= size <= most
        assert size not in tried
        assert size <= max(2 * largest, 1)  # no try takes much more than what fits
        tried.append(size)
        return size <= largest

    assert largest_that_fits(fits, most) == min(largest, most)
    assert len(tried) <= 2 * math.log2(most + 1) + 2


def test_what_was_tried_is_told() -> None:
    assert Search([Fitting(1, True, 5), Fitting(2, True, 6), Fitting(4, False, 9)], 8).largest == 2
    assert Search([Fitting(1, False, 0)], 8).largest == 0


def test_memory_in_words() -> None:
    assert [bytes_of(text) for text in ("4GiB", "500M", "1.5 gb", "100")] == [4 << 30, 500 << 20, 3 << 29, 100]
    for text in ("much", "-1G", "0", ""):
        with pytest.raises(WrongUse, match="no amount of memory"):
            bytes_of(text)


def test_what_cannot_be_searched_is_refused() -> None:
    job = job_of("digits", Digits(), None, None, "cpu", Options())
    with pytest.raises(WrongUse, match="on a CPU it must be said"):
        search(job, None, 2, 8, print)
    with pytest.raises(WrongUse, match="try nothing"):
        search(job, 1 << 30, 2, 0, print)
    with pytest.raises(WrongUse, match="there are 3 samples, and dp=2 computes 4 at a time"):
        search(replace(job, task=Digits(samples=3), layout=Layout(dp=2)), 1 << 30, 2, 8, print)
