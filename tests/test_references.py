"""A task is found by its name, wherever people keep it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from phalanx import WrongUse
from phalanx.recipes.gpt import GPT
from phalanx.references import find_task
from phalanx.run import short_name

TASK = "from dataclasses import dataclass\nimport phalanx\n\n@dataclass\nclass {name}(phalanx.Task):\n    pass\n"


def test_a_task_is_found_by_file_by_class_and_by_recipe(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(TASK.format(name="One"))
    assert find_task(str(file)).__name__ == "One"
    file.write_text(TASK.format(name="One") + TASK.format(name="Two"))
    assert find_task(f"{file}:Two").__name__ == "Two"
    with pytest.raises(WrongUse, match="holds 2 tasks: name one"):
        find_task(str(file))
    with pytest.raises(WrongUse, match="has no task 'Tow'; did you mean 'Two'"):
        find_task(f"{file}:Tow")
    (tmp_path / "taken.py").write_text("from phalanx.recipes.gpt import GPT\nfrom phalanx import Task\n")
    assert find_task(f"{tmp_path / 'taken.py'}:GPT") is GPT
    with pytest.raises(WrongUse, match="has no task 'Task'"):
        find_task(f"{tmp_path / 'taken.py'}:Task")
    assert find_task("gpt") is GPT
    with pytest.raises(WrongUse, match="did you mean 'gpt'"):
        find_task("gtp")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def f(:\n", "line 1: invalid syntax"),
        ("import nowhere_to_be_found\n", "No module named 'nowhere_to_be_found'"),
        ("x = 1 / 0\n", r"ZeroDivisionError.*\n.*line 1: x = 1 / 0"),
        ("x = 1\n", "holds no subclass of phalanx.Task"),
        ("import sys\nsys.exit(2)\n", r"ends the program while it is imported \(exit code 2\). Put what it does"),
    ],
)
def test_a_file_that_is_no_task_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "broken.py"
    file.write_text(text)
    with pytest.raises(WrongUse, match=says):
        find_task(str(file))


def test_a_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "train_lm.py").write_text("")
    with pytest.raises(WrongUse, match=r"is not there; did you mean .*train_lm\.py"):
        find_task(str(tmp_path / "trian_lm.py"))


def test_a_module_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", sys.path[:])
    (tmp_path / "inner_package").mkdir()
    (tmp_path / "inner_package" / "deep.py").write_text(TASK.format(name="Deep"))
    (tmp_path / "inner_package" / "broken.py").write_text("import nowhere_to_be_found\n")
    assert find_task("inner_package.deep:Deep").__module__ == "inner_package.deep"
    assert find_task("inner_package/deep.py").__module__ == "phalanx_task_deep"
    with pytest.raises(WrongUse, match="has no task 'Deeep'; did you mean 'Deep'"):
        find_task("inner_package.deep:Deeep")
    for typo in ("inner_package.dep", "iner_package.deep", "gtp", "inner_package..deep", "."):
        with pytest.raises(WrongUse, match="is neither a recipe nor a Python file or module"):
            find_task(typo)
    with pytest.raises(
        WrongUse, match=r"cannot be imported: .*nowhere_to_be_found.*\n.*broken\.py, line 1: import nowhere"
    ):
        find_task("inner_package.broken")


def test_names_that_no_package_can_have_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", sys.path[:])
    for name, says in (
        ("my-project", "'my-project' cannot be a package's name"),
        ("json", "another one of that name is in use"),
    ):
        (tmp_path / name).mkdir()
        file = tmp_path / name / "decoder.py"
        file.write_text("from .other import thing\n" + TASK.format(name="One"))
        with pytest.raises(WrongUse, match=says):
            find_task(str(file))
    (tmp_path / "my-project" / "__init__.py").touch()
    file.with_name("alone.py").write_text(TASK.format(name="One"))
    assert find_task(str(file.with_name("alone.py"))).__name__ == "One"


@pytest.mark.parametrize(
    ("reference", "name"), [("gpt", "gpt"), ("a/b.py:C", "b"), ("a.b:C", "b"), ("a.b", "b"), ("x.py", "x")]
)
def test_a_run_is_called_after_its_task(reference: str, name: str) -> None:
    assert short_name(reference) == name
