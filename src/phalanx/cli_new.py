"""``phalanx new``: a task file to start from."""

from __future__ import annotations

import difflib
import importlib.util
import keyword
import sys
from pathlib import Path
from typing import Annotated

import typer

from phalanx.errors import WrongUse

TEMPLATES = Path(__file__).parent / "templates"
NEAR = 0.65
MEANS = {
    "lm": "pretrain", "llm": "pretrain", "gpt": "pretrain", "language": "pretrain", "mlm": "bert", "finetune": "sft",
    "fine-tune": "sft", "instruct": "sft", "chat": "sft", "lora": "sft", "rlhf": "dpo", "preference": "dpo",
}  # fmt: skip
"""What recipes are for, by other names."""
FILE, CLASS = "my_task", "MyTask"
"""What a template calls itself."""


def kinds() -> list[str]:
    """What a file may be made of: our recipes that have a template, and ``task``."""
    from phalanx.references import RECIPES

    found = [path.name.removesuffix(".py.txt") for path in TEMPLATES.glob("*.py.txt")]
    return sorted(kind for kind in found if kind == "task" or kind in RECIPES)


def written(kind: str, name: str) -> Path:
    """Write a template under a name; what is there is not touched."""
    known = kinds()
    if kind not in known:
        raise WrongUse(_unknown(kind, name, known))
    path = Path(name).with_suffix(".py") if name.endswith(".py") else Path(f"{name}.py")
    stem = path.stem
    if not stem.isidentifier() or keyword.iskeyword(stem):
        raise WrongUse(f"{stem!r} is no name of a Python file. Use letters, digits and _, such as my_task.")
    if path.exists():
        raise WrongUse(f"{path} is there already. Choose another name, or remove it first.")
    if stem in sys.stdlib_module_names or importlib.util.find_spec(stem) is not None:
        raise WrongUse(f"{stem!r} is the name of a module, which {path} would hide. Choose another, such as my_{stem}.")
    text = (TEMPLATES / f"{kind}.py.txt").read_text()
    own = "".join(part[:1].upper() + part[1:] for part in stem.split("_")) or CLASS
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x") as file:
        file.write(text.replace(FILE, stem).replace(CLASS, own))
    return path


def _unknown(kind: str, name: str, known: list[str]) -> str:
    """What to start from instead: a recipe that is nearly of that name or does that, or a task of one's own."""
    recipes = [each for each in known if each != "task"]
    near = difflib.get_close_matches(kind, known, n=1, cutoff=NEAR) or [MEANS.get(kind.lower(), "")]
    meant = f"Did you mean {near[0]}? Or write" if near[0] else "Write"
    return (
        f"there is no recipe {kind!r} to start from. {meant} a task of your own, of any kind: phalanx new task {name}; "
        f"recipes are {', '.join(recipes)}."
    )


def new(
    kind: Annotated[str, typer.Argument(help="a recipe, such as sft, or task: one of your own")],
    name: Annotated[str, typer.Argument(help="of the file to write, NAME.py")],
) -> None:
    """Write a commented task file to start from; it trains as it is."""
    path = written(kind, name)
    print(f"{path} is written. Train it: phalanx train {path}")
