"""The tree is what ARCHITECTURE.md says: every file in its table, every import along its arrows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "phalanx"
LEVELS = {
    "": 0,
    "parallel": 1,
    "data": 1,
    "checkpoint": 2,
    "launch": 2,
    "watch": 1,
    "train": 3,
    "prove": 4,
    "models": 1,
    "recipes": 5,
}
"""Rooms may import from lower levels and from themselves; files directly under phalanx/ are the nouns."""
TOP = {"cli": 9, "settings": 1, "references": 1, "__init__": 9}
ALLOWED: set[tuple[str, str]] = set()


def modules() -> list[Path]:
    return [path for path in SOURCE.rglob("*.py") if path.name != "__init__.py" or path.parent == SOURCE]


def level(name: str) -> int:
    parts = name.split(".")
    return TOP.get(parts[0], 0) if len(parts) == 1 else LEVELS[parts[0]]


def imports(path: Path) -> set[str]:
    """Modules of ours that this one imports, wherever in the file, but for typing."""
    tree = ast.parse(path.read_text())
    typing = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in typing:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("phalanx."):
            base = node.module.removeprefix("phalanx.")
            inner = [f"{base}.{alias.name}" for alias in node.names]
            found |= {name if (SOURCE / (name.replace(".", "/") + ".py")).exists() else base for name in inner}
        elif isinstance(node, ast.ImportFrom) and node.module == "phalanx":
            found |= {alias.name for alias in node.names if (SOURCE / f"{alias.name}.py").exists()}
    return found


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


def test_every_file_is_in_the_table() -> None:
    table = set(re.findall(r"^\| `([\w/]+\.py)` \|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE))
    tree = {str(path.relative_to(SOURCE)) for path in modules() if path.name != "__init__.py"}
    assert table == tree


def test_imports_go_along_the_arrows() -> None:
    wrong = []
    for path in modules():
        own = name_of(path)
        for other in imports(path):
            same_room = own.split(".")[0] == other.split(".")[0] and "." in own
            allowed = (own, other.split(".")[0]) in ALLOWED
            if not same_room and not allowed and level(other) >= level(own) and level(other) > 0:
                wrong.append(f"{own} imports {other}")
    assert not wrong


def test_files_and_functions_stay_small() -> None:
    for path in modules():
        text = path.read_text()
        assert text.count("\n") <= 400, f"{path} is two ideas"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 80, f"{path}: {node.name} is too long"


def test_private_torch_names_are_in_one_file() -> None:
    for path in modules():
        if path.name == "torch_private.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                words = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
                private = [w for w in words if "torch" in words[0] + w and re.search(r"(^|\.)_[a-z]", w)]
                assert not private, f"{path} imports {private}"


def test_tests_mirror_the_source() -> None:
    here = Path(__file__).parent
    elsewhere = {
        "parallel.randomness.answers", "parallel.weights.replicate", "train.agreement", "train.clock",
        "train.job", "train.loop", "train.optimizers", "train.rank", "train.scale", "prove.ranks.trial",
        "prove.ranks.witness",
        "prove.ranks.outcome", "prove.ranks.record", "prove.explanation.scene", "prove.explanation.explain",
        "prove.explanation.stopped", "prove.explanation.finding", "prove.explanation.sites", "prove.bugs.around",
        "prove.bugs.resume", "train.options", "train.placing", "train.check.subject", "train.check.learning",
        "prove.cases", "prove.job", "prove.explanation.causes", "prove.replacing", "launch.rounds",
    }  # fmt: skip
    for path in modules():
        own = path.relative_to(SOURCE)
        if name_of(path) not in elsewhere and path.name != "__init__.py":
            assert (here / own.with_name(f"test_{own.name}")).exists(), f"{own} has no test file"
