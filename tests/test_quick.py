"""What is left to `make test-every` is there, and of what is run every time nothing is misspelt."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.quick import KEPT, left_out

HERE = Path(__file__).parent


@pytest.mark.parametrize("file", KEPT)
def test_every_test_that_is_named_is_there(file: str) -> None:
    there = {node.name for node in ast.walk(ast.parse((HERE / file).read_text())) if isinstance(node, ast.FunctionDef)}
    assert {*KEPT[file]} <= there


def test_cases_that_are_named_are_there(request: pytest.FixtureRequest) -> None:
    """Of the files of this run."""
    found: dict[tuple[str, str], set[str]] = {}
    for item in request.session.items:
        path, _, test = item.nodeid.partition("::")
        name, _, case = test.partition("[")
        found.setdefault((path.removeprefix("tests/"), name), set()).add(case.removesuffix("]"))
    for file, tests in KEPT.items():
        for test, kept in tests.items():
            if isinstance(kept, tuple) and (file, test) in found:
                assert {*kept} <= found[file, test], (file, test)


class Case:
    def __init__(self, nodeid: str, every: bool = False) -> None:
        self.nodeid, self.name, self.every = nodeid, nodeid.partition("::")[2], every

    def get_closest_marker(self, name: str) -> bool:
        return self.every


def test_cases_are_spread_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, dict[str, int | tuple[str, ...]]] = {"a.py": {"some": 2, "named": ("x-y",), "none": 0}}
    monkeypatch.setattr("tests.quick.KEPT", kept)
    names = [*(f"some[{n}]" for n in range(6)), "other", "named[x]", "named[x-y]", "none"]
    cases = [Case(f"tests/a.py::{name}") for name in names] + [Case("tests/a.py::none[marked]", every=True)]
    left = [case.name for case in left_out(cases)]  # type: ignore[arg-type]
    assert left == ["some[1]", "some[2]", "some[4]", "some[5]", "named[x]", "none"]
