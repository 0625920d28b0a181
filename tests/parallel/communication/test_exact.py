"""Exact sums: one tree whoever adds, and norms that no division of the elements changes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phalanx.parallel.communication.exact import Partial, Squares, fold, largest
from phalanx.parallel.communication.memory import Buffers

CPU = torch.device("cpu")


def tree(rows: Tensor) -> Tensor:
    """By the book."""
    if len(rows) == 1:
        return rows[0]
    middle = 1 << (len(rows) - 1).bit_length() - 1
    return tree(rows[:middle]) + tree(rows[middle:])


def same(a: Tensor, b: Tensor) -> bool:
    """To the bit, the sign of a zero too."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("count", range(1, 18))
def test_rows_are_added_by_the_tree(count: int) -> None:
    rows = torch.randn(count, 33, generator=torch.Generator().manual_seed(count))
    expected, output = tree(rows), torch.empty(33)
    fold(rows.clone(), output)
    assert same(output, expected)
    assert same(fold(rows.clone()), expected)


@pytest.mark.parametrize("leaves", [1, 2, 4, 8, 32])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_any_division_between_ranks_gives_the_same_bits(leaves: int, ranks: int) -> None:
    if ranks > leaves:
        return
    rows = torch.randn(leaves, 33, generator=torch.Generator().manual_seed(leaves))
    rows[:, 0], rows[0, 1] = -0.0, -0.0  # zeros keep their sign only where all are alike
    expected = tree(rows)
    assert same(fold(torch.stack([added(part) for part in rows.chunk(ranks)])), expected), "runs, then ranks"
    assert same(added(torch.stack([fold(part.clone()) for part in rows.split(ranks)])), expected), "ranks, then runs"


def added(rows: Tensor) -> Tensor:
    """One after another, as micro-batches come."""
    buffers = Buffers(CPU)
    partial = Partial(len(rows), buffers)
    most = 0
    for row in rows:
        total = partial.add(buffers.take(*row.shape, dtype=row.dtype).copy_(row))
        most = max(most, len(buffers._lent))
    assert total is not None
    assert most <= max(1, int(math.log2(len(rows)))), "more memory than a buffer a level"
    return total


def test_a_step_that_stopped_half_way_is_forgotten() -> None:
    buffers = Buffers(CPU)
    partial = Partial(2, buffers)
    assert partial.add(buffers.take(3, dtype=torch.float32).fill_(9)) is None
    partial.clear()
    assert partial.add(buffers.take(3, dtype=torch.float32).fill_(1)) is None
    total = partial.add(buffers.take(3, dtype=torch.float32).fill_(2))
    assert total is not None
    assert total.tolist() == [3, 3, 3]


def norm(shards: list[Tensor]) -> float:
    squares = Squares(float(largest(shards, CPU)), sum(shard.numel() for shard in shards))
    return squares.root(sum((squares.sum([shard], CPU) for shard in shards), torch.zeros(2, dtype=torch.int64)))


@given(st.integers(0, 2**32), st.integers(1, 3000), st.integers(1, 9), st.sampled_from([torch.float32, torch.float64]))
def test_a_norm_does_not_depend_on_who_holds_what(seed: int, size: int, parts: int, dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=source, dtype=dtype) * 10 ** (4 * torch.randn(size, generator=source))
    whole = norm([values])
    assert norm(list(values.chunk(parts))) == whole
    assert norm([values[torch.randperm(size, generator=source)]]) == whole
    assert math.isclose(whole, float(values.double().norm()), rel_tol=1e-12)


@pytest.mark.parametrize("size", [0.0, 5e-324, 1e-300, 1e-45, 1.0, 1e38, 1e300])
def test_norms_of_any_size(size: float) -> None:
    values = torch.tensor([3 * size, -4 * size, 0.0], dtype=torch.float64)
    assert math.isclose(norm([values, torch.empty(0, dtype=torch.float64)]), 5 * size, rel_tol=1e-12, abs_tol=1e-305)


def test_a_norm_beyond_all_numbers_is_infinite() -> None:
    assert norm([torch.full((4,), 1.7e308, dtype=torch.float64)]) == math.inf


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_the_largest(bad: float) -> None:
    values = torch.ones(1001)
    values[777] = bad
    assert float(largest([torch.ones(3), values], CPU)) == math.inf
    assert float(largest([], CPU)) == 0
