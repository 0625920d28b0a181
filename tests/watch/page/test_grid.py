"""Tables that grow, and buckets that lose no extreme."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from phalanx.watch.page.grid import StepGrid, bucket_width, thinned


def test_a_grid_grows_and_forgets_what_is_done_again() -> None:
    grid = StepGrid()
    grid.put(0, np.arange(5), np.arange(5.0))
    grid.put(3, np.array([7]), 2.5)
    assert grid.values.shape == (4, 8)
    assert np.isnan(grid.values[1]).all()
    grid.cut(0, 3)
    assert grid.values[0, :3].tolist() == [0, 1, 2]
    assert np.isnan(grid.values[0, 3:]).all()
    assert grid.values[3, 7] == 2.5, "another rank's"
    grid.leave_out([1, 700])
    assert np.isnan(grid.values[:, 1]).all()
    assert grid.within(6, 12, 6).shape == (6, 6)
    assert grid.within(6, 12, 6)[3, 1] == 2.5


@given(
    st.lists(st.one_of(st.floats(-9, 9), st.just(float("nan"))), min_size=1, max_size=60),
    st.integers(0, 50),
    st.integers(1, 20),
)
def test_the_least_and_the_most_of_each_bucket_are_kept(values: list[float], first: int, width: int) -> None:
    low, high = thinned(np.array(values), first, width)
    buckets: dict[int, list[float]] = {}
    for step, value in enumerate(values, first):
        buckets.setdefault(step // width, []).append(value)
    known = [[value for value in own if value == value] for own in buckets.values()]
    np.testing.assert_array_equal(low, [min(own, default=np.nan) for own in known])
    np.testing.assert_array_equal(high, [max(own, default=np.nan) for own in known])


def test_buckets_are_no_more_than_columns_and_change_seldom() -> None:
    widths = [bucket_width(steps, 500) for steps in range(1, 20_000, 37)]
    assert set(widths) == {1, 2, 5, 10, 20, 50}
    assert all(steps / width <= 500 for steps, width in zip(range(1, 20_000, 37), widths, strict=True))
