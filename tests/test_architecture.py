"""The tree is what ARCHITECTURE.md says: every file in its table, every import along its arrows.

Some sets name what is not so yet. They must not grow, and an entry that is not needed any more must go.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from tests import picture
from tests.picture import PAGE, SOURCE, graph, name_of

FIRST_PAGE = 45
"""Lines up to the first heading after those that a newcomer reads."""


def modules() -> list[Path]:
    return [path for path in picture.files() if path.name != "__init__.py" or path.parent == SOURCE]


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield name_of(path), node


def levels(first: str) -> dict[str, int]:
    """How high each room stands, by the line of arrows of the page that begins with this one."""
    (line,) = re.findall(rf"^`({first} -> [\w, >-]+)`", PAGE.read_text(), re.MULTILINE)
    rows = reversed(line.split(" -> "))
    return {name: level for level, row in enumerate(rows) for name in row.split(", ")}


def test_every_file_is_in_the_table() -> None:
    table = re.findall(r"^\| `([\w/]+\.py)` \|", PAGE.read_text(), re.MULTILINE)
    tree = {str(path.relative_to(SOURCE)) for path in modules() if path.name != "__init__.py"}
    assert set(table) == tree
    assert len(table) == len(tree), "a file stands there twice"


@pytest.mark.parametrize(("first", "edges"), [("cli", picture.outer()), ("spread", picture.inside("parallel"))])
def test_imports_go_along_the_arrows(first: str, edges: picture.Edges) -> None:
    level = levels(first)
    assert level.keys() == edges.keys()
    wrong = [f"{room} imports {other}" for room in edges for other in edges[room] if level[other] >= level[room]]
    assert not wrong


def test_the_pictures_are_drawn_from_the_imports() -> None:
    for title, drawn in picture.pictures().items():
        assert picture.shown(PAGE.read_text(), title) == drawn, "draw it again: python -m tests.picture --write"


def test_files_that_the_page_names_are_there() -> None:
    page = PAGE.read_text()
    known = {str(path.relative_to(SOURCE)) for path in picture.files()} | {path.name for path in picture.files()}
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", page))
    assert len(named) > 100
    assert not {name for name in named - known if not (PAGE.parent / name).exists()}


def test_the_first_page_fits_a_screen() -> None:
    page = PAGE.read_text()
    assert page[: page.index("\n## What happens on the way")].count("\n") <= FIRST_PAGE


def test_words_of_the_glossary_are_words_of_the_code() -> None:
    page = PAGE.read_text()
    rows = re.findall(r"^\| (.+?) \|", page[page.index("## Glossary") : page.index("## Files")], re.MULTILINE)
    words = {word for row in rows for name in re.findall(r"`([\w.]+)`", row) for word in name.split(".")}
    assert len(words) > 50
    defined = {
        getattr(node, "name", None) or getattr(node, "attr", None)
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.Attribute))
    }
    assert not words - defined


def test_no_two_files_import_each_other() -> None:
    found = graph()
    above: list[str] = []
    done: set[str] = set()

    def visit(name: str) -> None:
        assert name not in above, f"a cycle: {' -> '.join([*above[above.index(name) :], name])}"
        if name in done:
            return
        above.append(name)
        for other in sorted(found.get(name, ())):
            visit(other)
        done.add(above.pop())

    for name in found:
        if name != "__init__":
            visit(name)


def test_files_stay_small() -> None:
    lines = {name_of(path): path.read_text().count("\n") for path in modules()}
    assert not {name for name, count in lines.items() if count > 600}


def test_functions_stay_small() -> None:
    lengths = {
        f"{file}.{node.name} at {node.lineno}": (node.end_lineno or 0) - node.lineno for file, node in functions()
    }
    assert not [where for where, length in lengths.items() if length >= 80]
    assert median(length + 1 for length in lengths.values()) <= 7


def _private(names: Iterator[str]) -> set[str]:
    """But for those that every namedtuple has."""
    return {name for name in names if re.match(r"_[a-z]", name)} - {"_asdict", "_fields", "_make", "_replace"}


def _defined(tree: ast.AST) -> set[str]:
    """Private names that a file gives to something: functions, classes, variables, attributes, settings of classes."""
    nodes = list(ast.walk(tree))
    named = (node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef)))
    stored = (node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    variables = (node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return _private(named) | _private(stored) | _private(variables)


def _used(tree: ast.AST) -> set[str]:
    """Of anything but itself: a class may use what it inherits."""
    nodes = list(ast.walk(tree))
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    read = (node.attr for node in attributes if ast.unparse(node.value) not in ("self", "cls", "super()"))
    imported = (alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names)
    return _private(read) | _private(imported)


def test_private_names_are_used_in_their_own_file() -> None:
    trees = {name_of(path): ast.parse(path.read_text()) for path in modules() if path.name != "torch_private.py"}
    ours = set().union(*map(_defined, trees.values()))
    assert not {name for name, tree in trees.items() if (_used(tree) - _defined(tree)) & ours}


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
        "__main__",
        "parallel.randomness.answers", "parallel.weights.replicate", "train.agreement",
        "train.job", "train.loop", "train.policy", "train.optimizers", "train.rank", "train.scale", "prove.ranks.trial",
        "prove.ranks.witness",
        "prove.ranks.outcome", "prove.ranks.record", "prove.explanation.scene", "prove.explanation.explain",
        "prove.explanation.stopped", "prove.explanation.finding", "prove.explanation.sites", "train.options",
        "train.placing", "train.check.subject", "train.check.learning", "prove.cases", "prove.job",
        "prove.explanation.causes", "prove.replacing", "launch.rounds",
    }  # fmt: skip
    bugs = {name_of(path) for path in (SOURCE / "prove" / "bugs").glob("*.py")}
    elsewhere |= bugs - {"prove.bugs.seams", "prove.bugs.planting", "prove.bugs.known"}  # test_known tries them
    for path in modules():
        own = path.relative_to(SOURCE)
        if name_of(path) not in elsewhere and path.name != "__init__.py":
            assert (here / own.with_name(f"test_{own.name}")).exists(), f"{own} has no test file"
