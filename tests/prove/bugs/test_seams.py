"""Bugs are planted at declared seams: public names of the product, which knows nothing of them."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import phalanx
from phalanx.prove.bugs import seams
from phalanx.prove.bugs.known import BUGS, FILES
from phalanx.prove.bugs.seams import Seam, replaced

SEAMS = {name: value for name, value in vars(seams).items() if isinstance(value, Seam)}
SOURCE = Path(phalanx.__file__).parent


def planted_at(name: str) -> list[Seam]:
    """The seams that a bug replaces."""
    used: list[Seam] = []
    with replaced() as replace:

        def noted(seam: Seam, value: Any) -> None:
            used.append(seam)
            replace(seam, value)

        BUGS[name].plant(noted)
        for seam in used:
            assert seam.owner.__dict__[seam.name] is not ORIGINAL[seam.path], f"{name} leaves {seam.path} as it is"
    return used


ORIGINAL = {seam.path: seam.owner.__dict__[seam.name] for seam in SEAMS.values()}


@pytest.mark.parametrize("name", list(SEAMS))
def test_a_seam_is_a_public_name_that_is_there(name: str) -> None:
    seam = SEAMS[name]
    assert seam.name in vars(seam.owner), f"{seam.path} is inherited or gone"
    assert not any(part.startswith("_") for part in seam.path.split(".")), f"{seam.path} is private"
    assert seam.path.startswith("phalanx.")
    assert seam.what
    assert "\n" not in seam.what


def test_no_seam_is_declared_twice() -> None:
    assert len({seam.path for seam in SEAMS.values()}) == len(SEAMS)


def test_every_seam_is_used_and_put_back() -> None:
    used = {seam.path for name in BUGS for seam in planted_at(name)}
    assert used == {seam.path for seam in SEAMS.values()}
    assert {seam.path: seam.owner.__dict__[seam.name] for seam in SEAMS.values()} == ORIGINAL


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.__name__.rpartition(".")[2])
def test_bugs_use_no_private_name_and_no_collective_of_the_product(file: ModuleType) -> None:
    tree = ast.parse(Path(str(file.__file__)).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            private = node.attr.startswith("_") and not node.attr.startswith("__")
            assert not private, f"{file.__name__}:{node.lineno} uses {ast.unparse(node)}"
        if isinstance(node, ast.ImportFrom):
            inside = (node.module or "").startswith(("phalanx.parallel.communication", "phalanx.parallel.axes"))
            assert not inside, f"{file.__name__} imports from {node.module}: have a function of seams do it"


def test_nothing_outside_of_prove_knows_of_bugs() -> None:
    for path in SOURCE.rglob("*.py"):
        if "prove" not in path.relative_to(SOURCE).parts:
            assert "prove.bugs" not in path.read_text(), path
