"""The rooms of the source and what each imports, drawn for ARCHITECTURE.md: ``python -m tests.picture [--write]``."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "phalanx"
PAGE = ROOT / "ARCHITECTURE.md"
WIDTH = 72
NOUNS = "nouns"
TORCH = "parallel.torch_private"
"""Imports nothing of ours, and may be imported anywhere."""
BEGIN, END = "<!-- drawn by python -m tests.picture: {} -->\n```text\n", "```\n"
Edges = dict[str, set[str]]


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def name_of(path: Path) -> str:
    """``train.step``; a package by its own name, and phalanx itself as ``__init__``."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def is_module(name: str) -> bool:
    path = SOURCE / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def for_typing(tree: ast.AST) -> set[int]:
    """Nodes that only a type checker looks at."""
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    return {id(inner) for block in blocks for each in block.body for inner in ast.walk(each)}


@cache
def imports(path: Path, typing: bool = False) -> set[str]:
    """Modules of ours that this one imports, wherever in the file: when it runs, or for a type checker alone."""
    tree = ast.parse(path.read_text())
    aside = for_typing(tree)
    nodes = [node for node in ast.walk(tree) if (id(node) in aside) == typing]
    return {name for node in nodes for name in _named(node)}


def _named(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "phalanx":
        base = node.module.removeprefix("phalanx").lstrip(".")
        for alias in node.names:
            inner = f"{base}.{alias.name}".lstrip(".")
            if is_module(inner) or base:
                yield inner if is_module(inner) else base
    elif isinstance(node, ast.Import):
        names = (alias.name.removeprefix("phalanx.") for alias in node.names if alias.name.startswith("phalanx."))
        yield from names


def graph(typing: bool = False) -> Edges:
    return {name_of(path): imports(path, typing) - {name_of(path)} for path in files()}


def room(name: str) -> str:
    """The folder that a module lies in; cli, its parts and its door for ``python -m`` are a room, other files nouns."""
    first = re.sub(r"^(__main__|cli_\w+)$", "cli", name.split(".")[0])
    return first if first == "cli" or (SOURCE / first).is_dir() else NOUNS


def inner_room(name: str) -> str:
    """Within a folder: the next one, or the file itself."""
    return name.split(".")[1]


def between(modules: Mapping[str, set[str]], of: object = room) -> Edges:
    """From modules to rooms."""
    assert callable(of)
    found: Edges = {of(name): set() for name in modules}
    for name, others in modules.items():
        found[of(name)] |= {of(other) for other in others} - {of(name)}
    return found


def outer() -> Edges:
    """Rooms, but for the package's own list of what users see. Torch's private names are a part of torch to them."""
    assert not graph()[TORCH]
    return between({name: others - {TORCH} for name, others in graph().items() if name != "__init__"})


def inside(folder: str) -> Edges:
    """Rooms within a folder."""
    own = {name: others for name, others in graph().items() if name.startswith(f"{folder}.")}
    within = {name: {other for other in others if other in own} for name, others in own.items()}
    return between(within, inner_room)


def layers(edges: Edges) -> list[list[str]]:
    """From the top: each room above all that it imports, as low as can be."""
    heights: dict[str, int] = {}

    def height(name: str, above: tuple[str, ...] = ()) -> int:
        if name in above:
            raise ValueError(f"rooms import each other: {' -> '.join([*above, name])}")
        if name not in heights:
            heights[name] = 1 + max((height(other, (*above, name)) for other in edges[name]), default=-1)
        return heights[name]

    rows: dict[int, list[str]] = {}
    for name in sorted(edges):
        rows.setdefault(height(name), []).append(name)
    return [rows[number] for number in sorted(rows, reverse=True)]


def draw(edges: Edges, silent: str = "") -> str:
    """Rooms stacked, each above all that it imports, then what each imports; ``silent``: what all of them do."""
    rows = layers(edges)
    lines = [_border([])]
    for number, row in enumerate(rows):
        edge = _border(_walls(row) + (_walls(rows[number + 1]) if number + 1 < len(rows) else []))
        lines += [_boxes(row), edge]
    wide = max(map(len, edges))
    arrows = [(name, sorted(edges[name] - {silent})) for row in rows for name in row]
    return "\n".join([*lines, *(f"{name:<{wide}} -> {', '.join(others)}" for name, others in arrows if others)]) + "\n"


def _walls(row: list[str]) -> list[int]:
    """Where boxes of a row meet."""
    return [round((number + 1) * (WIDTH - 1) / len(row)) for number in range(len(row) - 1)]


def _border(walls: list[int]) -> str:
    return "".join("+" if place in (0, WIDTH - 1, *walls) else "-" for place in range(WIDTH))


def _boxes(row: list[str]) -> str:
    edges = [0, *_walls(row), WIDTH - 1]
    cells = [name.center(right - left - 1) for name, left, right in zip(row, edges, edges[1:], strict=False)]
    return "|" + "|".join(cells) + "|"


def pictures() -> dict[str, str]:
    """By title, as they stand in the page."""
    return {"rooms": draw(outer(), NOUNS), "parallel": draw(inside("parallel"))}


def shown(page: str, title: str) -> str:
    """The picture that a page has."""
    begin = BEGIN.format(title)
    start = page.index(begin) + len(begin)
    return page[start : page.index(END, start)]


def main() -> None:
    page = PAGE.read_text()
    for title, picture in pictures().items():
        print(picture)
        begin = BEGIN.format(title)
        page = page.replace(begin + shown(page, title), begin + picture)
    if "--write" in sys.argv:
        PAGE.write_text(page)


if __name__ == "__main__":
    main()
