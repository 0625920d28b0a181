"""The room as a reader meets it: names that mean one thing, nothing private of others, files of one idea."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import phalanx

SOURCE = Path(phalanx.__file__).parent
ROOM = sorted((SOURCE / "prove").rglob("*.py"))


def classes(paths: list[Path]) -> Iterator[tuple[str, Path]]:
    for path in paths:
        yield from (
            (node.name, path) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
        )


def test_no_class_has_the_name_of_another() -> None:
    own = [name for name, _ in classes(ROOM)]
    others = {name for name, _ in classes([path for path in SOURCE.rglob("*.py") if path not in ROOM])}
    assert len(set(own)) == len(own)
    assert not set(own) & others


@pytest.mark.parametrize("path", ROOM, ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_private_of_another_module_is_used(path: Path) -> None:
    tree = ast.parse(path.read_text())
    own = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    own |= {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            assert node.attr in own or ast.unparse(node) == "sys._getframe", f"line {node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.ImportFrom):
            private = [alias.name for alias in node.names if alias.name.startswith("_") and alias.name != "__version__"]
            assert not private, f"line {node.lineno}: {private}"


@pytest.mark.parametrize("path", ROOM, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_file_is_one_idea(path: Path) -> None:
    assert path.read_text().count("\n") <= 600
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 50, f"{node.name} is long"
