"""From a task's name to its class: a recipe, a file, a module, or one of the last two with ``:Class``."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from phalanx.errors import WrongUse, closest
from phalanx.files import exists
from phalanx.task import Task
from phalanx.user_code import is_users_line

RECIPES = {
    "gpt": "phalanx.recipes.gpt:GPT",
    "sft": "phalanx.recipes.sft:SFT",
    "embed": "phalanx.recipes.embed:Embed",
    "dpo": "phalanx.recipes.dpo:DPO",
    "reward": "phalanx.recipes.reward:Reward",
    "distil": "phalanx.recipes.distil:Distil",
    "shapes": "phalanx.recipes.shapes:Shapes",
    "pretrain": "phalanx.recipes.pretrain:Pretrain",
    "bert": "phalanx.recipes.bert:Bert",
}

importing: list[str] = []
"""Files or modules that are imported for their tasks just now."""


def find_task(reference: str, folder: str | Path | None = None) -> type[Task]:
    """The class that a recipe's name, ``file.py``, ``package.module``, or one of these two with ``:Class`` stands for.

    Modules are imported as from the current folder, or from the one where a run began.
    """
    if reference in RECIPES:
        module, _, name = RECIPES[reference].partition(":")
        found: type[Task] = getattr(importlib.import_module(module), name)
        return found
    file, _, name = reference.partition(":")
    path = Path(file)
    if path.suffix != ".py":
        if not all(part.isidentifier() for part in file.split(".")):
            raise WrongUse(f"{reference!r} is neither a recipe nor a Python file or module; {_nearest(reference)}")
        return _choose(_import_module(file, folder or Path.cwd(), reference), name, file)
    if not (exists(path) and path.is_file()):
        nearby = [str(p) for p in path.parent.glob("*.py")] if exists(path.parent) and path.parent.is_dir() else []
        raise WrongUse(f"the task file {file} is not there; {closest(file, [*nearby, *RECIPES])}")
    return _choose(_import(path), name, file)


def _nearest(reference: str) -> str:
    return closest(reference, RECIPES)


def _sentence(clause: str) -> str:
    return clause if clause.endswith("?") else f"{clause}."


def _import_module(name: str, folder: str | Path, reference: str) -> types.ModuleType:
    """A module by its name; the current folder is looked in first, as ``python -m`` does."""
    _look_in(Path(folder))
    with _told(name, None):
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # something that a package imports itself
            spec = None
        if spec is None:
            raise WrongUse(
                f"{reference!r} is neither a recipe nor a Python file or module that can be imported from {folder}; "
                f"{_sentence(_nearest(reference))} A module that lies elsewhere is found by its file, "
                "package/module.py, or with its folder in PYTHONPATH."
            )
        return importlib.import_module(name)


def _import(path: Path) -> types.ModuleType:
    """A file: as a module of its package where it is in one, or imports relative to it; else by itself."""
    root, parts = _package(path)
    _look_in(path.parent)
    if len(parts) == 1:
        name = f"phalanx_task_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up there
        with _told(str(path), path):
            spec.loader.exec_module(module)
        return module
    name = ".".join(parts)
    _look_in(root)
    with _told(str(path), path):
        module = importlib.import_module(name)
    if Path(module.__file__ or "").resolve() != path.resolve():
        raise WrongUse(
            f"{path} is the module {name} of its package, and another one of that name is in use, {module.__file__}. "
            "Give its folder another name."
        )
    return module


def _look_in(folder: Path) -> None:
    """Import from this folder first."""
    where = str(folder.resolve())
    if where in sys.path:
        sys.path.remove(where)
    sys.path.insert(0, where)


def _package(path: Path) -> tuple[Path, list[str]]:
    """The folder that a file's outermost package lies in, and the file's name as a module from there."""
    folder, parts = path.resolve().parent, [path.stem]
    up = _dots(path)
    while (exists(folder / "__init__.py") or len(parts) <= up) and folder.name:
        if not folder.name.isidentifier():
            if len(parts) > up:
                break
            raise WrongUse(
                f"{path} imports relative to its folder, and {folder.name!r} cannot be a package's name. Name the "
                "folder with letters, digits and _, or import without the dot."
            )
        parts.insert(0, folder.name)
        folder = folder.parent
    return folder, parts


def _dots(path: Path) -> int:
    """How far up a file's relative imports reach: 1 for ``from .model import Net``."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return 0  # said when it is imported
    return max((node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)), default=0)


@contextmanager
def _told(what: str, path: Path | None) -> Iterator[None]:
    """What fails while a task is imported is told with its line."""
    importing.append(what)
    try:
        yield
    except SyntaxError as error:
        where = f"{error.filename or what}" + (f", line {error.lineno}" if error.lineno else "")
        pointer = f"\n    {(error.text or '').rstrip()}\n    {' ' * ((error.offset or 1) - 1)}^" if error.text else ""
        raise WrongUse(f"{where}: {error.msg}{pointer}\nMend that line and start again.") from None
    except WrongUse:
        raise
    except SystemExit as error:
        raise WrongUse(
            f"{what} ends the program while it is imported (exit code {error.code}). Put what it does as a script "
            'under if __name__ == "__main__":, so that it can be imported.'
        ) from None
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users_line(f.filename)]
        own = [f for f in frames if path is not None and Path(f.filename).resolve() == path.resolve()]
        shown = [*own[-1:], *(f for f in frames[-1:] if f not in own[-1:])]
        lines = "".join(f"  {f.filename}, line {f.lineno}: {f.line}\n" for f in shown) or f"  {what}\n"
        failed = f"{what} cannot be imported: {type(error).__name__}: {error}"
        raise WrongUse(f"{failed}\n{lines}Mend the file, or install what it needs.") from None
    finally:
        importing.pop()


def _choose(module: types.ModuleType, name: str, file: str) -> type[Task]:
    every = {key: value for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, Task)}
    own = {key: value for key, value in every.items() if value.__module__ == module.__name__}
    if name:
        if name not in every or every[name] is Task:
            raise WrongUse(f"{file} has no task {name!r}; {closest(name, own)}")
        return every[name]
    if len(own) != 1:
        which = (
            f"holds {len(own)} tasks: name one, e.g. {file}:{next(iter(own))}"
            if own
            else "holds no subclass of phalanx.Task. Define one"
        )
        raise WrongUse(f"{file} {which}.")
    return next(iter(own.values()))
