"""Which layout on how many ranks, from the command line's words."""

from __future__ import annotations

import pytest

from phalanx.layout import Layout
from phalanx.train.placing import place


@pytest.mark.parametrize(
    ("layout", "on", "nodes", "expected", "ranks"),
    [
        (None, "local:4", 1, "dp=4", 4),
        (None, "local:4", 2, "dp=8", 4),
        ("fsdp=2,tp=2", None, 1, "fsdp=2,tp=2", 4),
        ("comm=int4", "local:4", 1, "dp=4,comm=int4", 4),
        ("recompute=full,comm=int8", "local:2", 2, "dp=4,comm=int8,recompute=full", 2),
        ("dp=1,comm=int4", "local:4", 1, "dp=1,comm=int4", 4),
        ("fsdp=1", "local:2", 1, "dp=1", 2),
    ],
)
def test_each_comes_from_the_other(layout: str | None, on: str | None, nodes: int, expected: str, ranks: int) -> None:
    assert place(layout, on, nodes) == (Layout.parse(expected), ranks)
