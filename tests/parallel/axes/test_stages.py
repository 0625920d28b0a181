"""Stages: balanced by cost, every weight somewhere, shared ones where they are used."""

from __future__ import annotations

import pytest

from phalanx import Anatomy, WrongUse
from phalanx.models.transformer import Transformer, TransformerConfig
from phalanx.parallel.axes.stages import Stages, divide, runs


def stages(ranks: int, schedule: str = "1f1b", **options: object) -> Stages:
    model = Transformer(TransformerConfig(**options))  # type: ignore[arg-type]
    return divide(model, Anatomy.of(model), ranks, schedule)


def test_a_large_head_makes_the_last_stage_shorter() -> None:
    assert [len(blocks) for blocks in stages(2, layers=8, vocabulary=16).blocks] == [4, 4]
    assert [len(blocks) for blocks in stages(2, layers=8, vocabulary=8192).blocks] == [7, 1]


def test_every_weight_is_where_it_is_used() -> None:
    found = stages(2, layers=4, tied=True)
    assert found.holders("embedding.weight") == [0, 1]
    assert found.holders("blocks.0.attention.q_proj.weight") == [0]
    assert found.holders("blocks.3.attention.q_proj.weight") == [1]
    assert found.holders("norm.weight") == [1]
    assert found.holders("rates") == [0, 1]
    assert stages(3, layers=4, tied=True).holders("embedding.weight") == [0, 2]
    assert stages(2, layers=4).holders("embedding.weight") == [0]


def test_interleaved_ranks_have_two_stages() -> None:
    found = stages(2, "interleaved", layers=4)
    assert found.blocks == (("blocks.0",), ("blocks.1",), ("blocks.2",), ("blocks.3",))
    assert list(found.of(1)) == [1, 3]
    assert found.holders("blocks.2.attention.q_proj.weight") == [0]


def test_fewer_blocks_than_stages_are_refused() -> None:
    with pytest.raises(WrongUse, match=r"pp=4 makes 4 stages, and Transformer can be cut into 3 at most.*pp=3 or less"):
        stages(4, layers=3)
    with pytest.raises(WrongUse, match=r"pp=2,schedule=interleaved makes 4 stages.*pp=1 or less"):
        stages(2, "interleaved", layers=3)


def test_cuts_of_the_task_are_kept() -> None:
    model = Transformer(TransformerConfig(layers=4))
    anatomy = Anatomy.of(model, cuts=["blocks.0", "blocks.3"])
    assert [len(blocks) for blocks in divide(model, anatomy, 2, "1f1b").blocks] == [3, 1]


@pytest.mark.parametrize(("costs", "parts", "expected"), [
    ([1, 1, 1, 1], 2, [(0, 2), (2, 4)]),
    ([1, 1, 1, 1, 3], 2, [(0, 3), (3, 5)]),
    ([5, 1, 1, 1], 2, [(0, 1), (1, 4)]),
    ([1, 2, 3], 3, [(0, 1), (1, 2), (2, 3)]),
])  # fmt: skip
def test_runs_are_balanced_by_cost(costs: list[float], parts: int, expected: list[tuple[int, int]]) -> None:
    assert list(runs(costs, parts)) == expected
