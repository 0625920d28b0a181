"""What of a batch belongs to some of its samples."""

from __future__ import annotations

from typing import Any

import torch

from phalanx import Logits
from phalanx.train.check.parts import differ, longer, paired, rows_of

COUNT, PART = 7, range(3, 7)


def pairs(whole: Any, alone: Any) -> list[tuple[list[Any], list[Any]]]:
    return [(a.tolist(), b.tolist()) for a, b in paired(whole, alone, PART, COUNT)]


def test_rows_of_a_tensor_are_those_of_its_samples() -> None:
    x = torch.arange(14).view(7, 2)
    assert pairs(x, x[3:]) == [(x[3:].tolist(), x[3:].tolist())]
    assert pairs(x.T, x.T[:, 3:]) == [(x.T[:, 3:].tolist(), x.T[:, 3:].tolist())]
    assert pairs({"a": (x, "b")}, {"a": (x[3:], "c")}) == pairs(x, x[3:])
    assert pairs(Logits(x, x), x[3:]) == pairs(x, x[3:])
    assert pairs(x, torch.zeros(4, 3)) == pairs(x, torch.zeros(4)) == pairs(x, None) == pairs([x], None) == []
    assert rows_of(torch.zeros(2, 5), PART, COUNT, torch.zeros(2, 5)) is not None


def test_a_list_with_an_item_a_sample_is_compared_by_samples() -> None:
    lists = [torch.full((2,), i) for i in range(7)]
    assert pairs(lists, lists[3:]) == [([i, i], [i, i]) for i in range(3, 7)]
    dicts = [{"boxes": [x, str(i)]} for i, x in enumerate(lists)]
    assert pairs(dicts, dicts[3:]) == pairs(lists, lists[3:])
    unequal = [torch.full((1 + i % 2,), i) for i in range(7)]
    assert len(pairs(unequal, unequal[3:])) == 4
    assert pairs(lists, [torch.zeros(3)] * 4) == [], "padded"


def test_a_list_of_levels_is_no_list_of_samples() -> None:
    levels = [torch.arange(7), torch.arange(7) * 2, torch.arange(7) * 3]
    alone = [level[3:] for level in levels]
    assert pairs(levels, alone) == [(level.tolist(), level.tolist()) for level in alone]


def test_rounding_is_no_difference() -> None:
    x = torch.randn(4, dtype=torch.float64)
    assert not differ(x, x * (1 + 1e-9), torch.float64)
    assert not differ(x * torch.nan, x * torch.nan, torch.float64)
    assert differ(x, x * (1 + 1e-4), torch.float64)
    assert differ(torch.cat([x, x * torch.inf]), torch.cat([x * 2, x * torch.inf]), torch.float64)
    assert not differ(x, x * (1 + 1e-4), torch.float32)
    assert differ(torch.tensor([1]), torch.tensor([2]), torch.float64)
    assert not differ(x[:0], x[:0], torch.float64)


def test_what_is_padded_is_longer_in_the_batch() -> None:
    assert longer([{"x": torch.zeros(7, 9)}], [{"x": torch.zeros(4, 8)}]) == ((7, 9), (4, 8))
    for whole, alone in (
        (torch.zeros(7, 9), torch.zeros(4, 9)), (torch.zeros(7), torch.zeros(4)), (torch.zeros(7, 9), None),
        (torch.zeros(7, 8), torch.zeros(4, 9)), (torch.zeros(7, 8), torch.zeros(4)),
    ):  # fmt: skip
        assert longer(whole, alone) is None
