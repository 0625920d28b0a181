"""A profile by module: ranks put together, blocks that are alike folded, rows that fit a screen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from phalanx.watch.module_table import NUMBERS, conclude_modules, folded, joined, module_part_path, readable


def row(name: str, kind: str = "Linear", **numbers: Any) -> dict[str, Any]:
    return {"name": name, "kind": kind, **dict.fromkeys(NUMBERS, 0), **numbers}


def blocks(number: int) -> list[dict[str, Any]]:
    found = [row("", "Model"), row("blocks", "ModuleList")]
    for n in range(number):
        found += [row(f"blocks.{n}", "Block", forward_ms=2.0), row(f"blocks.{n}.up", forward_ms=1.0, weights=10)]
    return [*found, row("head")]


def test_ranks_share_flops_and_the_slowest_has_the_time() -> None:
    ranks = [
        [row("a", forward_ms=1.0, forward_flops=5, calls=1, weights=3)],
        [row("a", forward_ms=4.0, forward_flops=6, calls=1, weights=3)],
    ]
    (found,) = joined(ranks)
    assert (found["forward_ms"], found["forward_flops"], found["calls"], found["weights"]) == (4.0, 11, 1, 3)
    assert [each["name"] for each in joined([[row("a")], [row("b")]])] == ["a", "b"]


def test_blocks_that_are_alike_are_one_row() -> None:
    found = {each["name"]: each for each in folded(blocks(12))}
    assert list(found) == ["", "blocks", "blocks.*", "blocks.*.up", "head"]
    assert found["blocks.*"]["forward_ms"] == 24.0
    assert found["blocks.*.up"]["weights"] == 120
    assert found["blocks.*.up"]["count"] == 12


def test_what_is_numbered_and_not_alike_is_not_folded() -> None:
    rows = [row("", "Sequential"), row("0"), row("1", "ReLU"), row("2")]
    assert [each["name"] for each in folded(rows)] == ["", "0", "1", "2"]


def test_only_as_many_levels_as_fit() -> None:
    rows = [row(""), *(row(name) for name in "abc"), *(row(f"{name}.{part}") for name in "abc" for part in "xyz")]
    assert len(readable(rows, 20)) == 13
    assert len(readable(rows, 12)) == 4
    assert len(readable(rows, 2)) == 1


def test_a_table_in_words_and_as_json(tmp_path: Path) -> None:
    for rank in (0, 1):
        path = module_part_path(tmp_path, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [row("", "Model", calls=1, forward_flops=3_000_000), row("a", calls=1, forward_flops=3_000_000)]
        facts = {
            "rank": rank,
            "world": 3,
            "step": 3,
            "layout": "dp=3",
            "notes": ["x was not counted"],
            "outside_flops": 1_000_000,
        }
        path.write_text(json.dumps({**facts, "modules": rows}))
    text = conclude_modules(tmp_path)
    assert text is not None
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "profile by module of step 3 on 2 ranks of 3 (dp=3)"
    assert "(model) Model 1 0.00 0.00 6 M 75.0 % 0 0 B" in lines
    assert "(loss and update) 2 M 25.0 %" in lines
    assert "note: of rank 2 there is nothing" in lines
    assert lines.count("note: x was not counted") == 1
    kept = json.loads((tmp_path / "profile" / "modules.json").read_text())
    assert [each["forward_flops"] for each in kept["modules"]] == [6_000_000, 6_000_000]
    assert kept["ranks"] == [0, 1]
    assert (tmp_path / "profile" / "modules.txt").read_text() == text
    assert conclude_modules(tmp_path) is None
