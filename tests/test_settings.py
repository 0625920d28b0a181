"""From words to a task: typed, checked, and refused with the closest match."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from phalanx import Task, WrongUse
from phalanx.recipes.gpt import GPT
from phalanx.settings import convert, find_task, make_task, parse_assignments, plain_settings, short_name, unwritten
from phalanx.toml import from_toml, to_toml


class Colour(enum.Enum):
    red = 1
    blue = 2


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("128", int, 128), ("1e3", int, 1000), ("1_000", int, 1000), ("-3", int, -3),
        ("0.5", float, 0.5), ("3", float, 3.0), ("inf", float, float("inf")),
        ("true", bool, True), ("No", bool, False), ("0", bool, False),
        ("none", int | None, None), ("4", int | None, 4), ("a", Literal["a", "b"], "a"),
        ("1,2, 3", list[int], [1, 2, 3]), ("(1,2)", tuple[int, ...], (1, 2)), ("x/y", Path, Path("x/y")),
        ("red", Colour, Colour.red), ("text", str, "text"),
    ],
)  # fmt: skip
def test_text_becomes_the_fields_type(text: str, kind: object, value: object) -> None:
    assert convert(text, kind, "field") == value


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("abc", int, "a whole number"), ("1.5", int, "a whole number"), ("x", float, "a number"),
        ("maybe", bool, "true or false"), ("c", Literal["a", "b"], "one of: a, b"),
        ("green", Colour, "one of: red, blue"),
    ],
)  # fmt: skip
def test_text_of_another_type_is_refused(text: str, kind: object, says: str) -> None:
    with pytest.raises(WrongUse, match=f"width={text!r} is not {says}"):
        convert(text, kind, "width")


def test_fields_are_set_and_unknown_ones_refused() -> None:
    assert make_task(GPT, {"width": "64", "tied": "yes"}) == GPT(width=64, tied=True)
    with pytest.raises(WrongUse, match="GPT has no field 'wdith'; did you mean 'width'"):
        make_task(GPT, {"wdith": "64"})
    with pytest.raises(WrongUse, match="global_batch=0"):
        make_task(GPT, {"global_batch": "0"})
    with pytest.raises(WrongUse, match="is not name=value"):
        parse_assignments(["width"])


def test_a_field_without_a_default_must_be_set() -> None:
    @dataclass
    class Needs(Task):
        size: int

    with pytest.raises(WrongUse, match="Needs needs size"):
        make_task(Needs, {})
    assert make_task(Needs, {"size": "3"}).size == 3


def test_a_class_that_forgot_to_be_a_dataclass_is_told() -> None:
    class Forgot(Task):
        size: int = 3

    with pytest.raises(WrongUse, match="Put @dataclass above"):
        make_task(Forgot, {})


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


@dataclass(frozen=True)
class Inner:
    width: int = 3
    colour: Colour = Colour.red
    api_key: str = ""


@dataclass
class Nested(Task):
    options: dict[str, Any] = field(default_factory=lambda: {"a": [1, {"b": None}], "c.d": {"e f": 0.5}})
    sizes: dict[int, Path] = field(default_factory=lambda: {1: Path("x")})
    inner: Inner = Inner(5, Colour.blue)
    layers: list[Inner] = field(default_factory=lambda: [Inner(1), Inner(2)])
    maybe: Inner | None = None
    pair: tuple[int, str] = (1, "a")
    bare: list = field(default_factory=lambda: [1, "a", 2.5])  # type: ignore[type-arg]
    names: frozenset[str] = frozenset({"a", "b"})
    dtype: torch.dtype = torch.bfloat16


@dataclass
class Unwritable(Nested):
    activation: Callable[..., Any] = torch.relu
    colours: dict[str, Any] = field(default_factory=lambda: {"a": Colour.red})


def again(task: Task) -> Task:
    return make_task(type(task), from_toml(to_toml({"settings": plain_settings(task)}))["settings"])


def test_nested_settings_read_back_as_they_are() -> None:
    task = Nested(maybe=Inner(7), options={"bytes": "no hex", "list": [], "empty": {}})
    assert unwritten(task) == []
    assert again(task) == task != Nested()
    assert again(Nested()) == Nested()
    assert plain_settings(task)["inner"] == {"width": 5, "colour": "blue", "api_key": ""}


def test_what_text_cannot_say_is_known() -> None:
    task = Unwritable()
    assert unwritten(task) == ["activation", "colours"]
    assert again(task) == task


def test_a_table_can_be_set_by_a_word() -> None:
    task = make_task(Nested, {"options": '{"a": 1}', "inner": '{"width": 9}', "dtype": "float16"})
    assert isinstance(task, Nested)
    assert (task.options, task.inner, task.dtype) == ({"a": 1}, Inner(9), torch.float16)
    for wrong in ("3", "{", '{"wdith": 9}', '{"width": "x"}'):
        with pytest.raises(WrongUse, match="inner="):
            make_task(Nested, {"inner": wrong})


def test_secrets_in_tables_are_not_written() -> None:
    task = Nested(inner=Inner(api_key="abc"), options={"token": "abc", "deep": [{"password": "abc"}]})
    plain = plain_settings(task)
    assert "abc" not in to_toml({"settings": plain})
    for name in ("inner", "options"):
        with pytest.raises(WrongUse, match=f"{name} is a secret"):
            make_task(Nested, {name: plain[name]})
