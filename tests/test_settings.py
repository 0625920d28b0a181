"""From words to a task: typed, checked, and refused with the closest match."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from phalanx import Layout, Task, WrongUse
from phalanx.recipes.gpt import GPT
from phalanx.recipes.sft import SFT
from phalanx.settings import convert, make_task, parse_assignments, plain_settings, task_fields, unwritten
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


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("lora_rank", "lora"), ("lora_r", "lora"), ("r", "lora"), ("lr", "learning_rate"),
        ("batch_size", "global_batch"), ("per_device_train_batch_size", "global_batch"),
        ("num_train_epochs", "epochs"), ("max_length", "length"),
    ],
)  # fmt: skip
def test_names_of_other_libraries_are_answered_with_ours(name: str, own: str) -> None:
    with pytest.raises(WrongUse, match=rf"SFT has no field '{name}'; here it is '{own}'.*: --set {own}="):
        make_task(SFT, {name: "8"})
    assert own in task_fields(SFT)


@pytest.mark.parametrize(("value", "own"), [("true", "drop"), ("True", "drop"), ("false", "keep")])
def test_drop_last_is_answered_with_what_it_is_here(value: str, own: str) -> None:
    with pytest.raises(WrongUse, match=f"no field 'drop_last'; here it is 'last_batch': --set last_batch={own}$"):
        make_task(GPT, {"drop_last": value})
    assert make_task(GPT, {"last_batch": own}).last_batch == own
    with pytest.raises(WrongUse, match="is not one of: keep, drop, merge"):
        make_task(GPT, {"last_batch": "cut"})


@pytest.mark.parametrize(
    ("name", "value", "layout"),
    [("comm", "int8", "dp=2,comm=int8"), ("tp", "2", "tp=2"), ("recompute", "full", "dp=2,recompute=full")],
)
def test_what_belongs_to_a_layout_is_said_to(name: str, value: str, layout: str) -> None:
    with pytest.raises(WrongUse) as refusal:
        make_task(SFT, {name: value})
    assert (
        str(refusal.value)
        == f"SFT has no field '{name}'; it is part of a layout, as in --layout {layout} (of prove: --layouts)"
    )
    assert getattr(Layout.parse(layout), name) == type(getattr(Layout(), name))(value)


def test_a_word_that_no_layout_knows_is_not_taken_for_its() -> None:
    with pytest.raises(WrongUse, match=r"SFT has no field 'schedule'; (did you mean|choose one of)"):
        make_task(SFT, {"schedule": "cosine"})  # of a pipeline, where it is one


def test_a_name_of_another_library_that_this_task_has_no_field_for_is_a_typo() -> None:
    with pytest.raises(WrongUse, match="GPT has no field 'lora_rank'; choose one of"):
        make_task(GPT, {"lora_rank": "8"})


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


def test_a_whole_number_where_any_is_meant_is_written_as_it_reads_back() -> None:
    written = plain_settings(Task(clip=1))["clip"]
    assert (written, type(written)) == (1.0, float)


def test_what_text_cannot_say_is_known() -> None:
    task = Unwritable()
    assert unwritten(task) == ["activation", "colours"]
    assert again(task) == task


def test_a_table_can_be_set_by_a_word() -> None:
    task = make_task(Nested, {"options": '{"a": 1}', "inner": '{"width": 9}', "dtype": "float16"})
    assert isinstance(task, Nested)
    assert (task.options, task.inner, task.dtype) == ({"a": 1}, Inner(9), torch.float16)
    for wrong in ("3", "{", '{"wdith": 9}', '{"width": "x"}'):
        with pytest.raises(WrongUse, match="inner"):
            make_task(Nested, {"inner": wrong})


def test_secrets_in_tables_are_not_written() -> None:
    task = Nested(inner=Inner(api_key="abc"), options={"token": "abc", "deep": [{"password": "abc"}]})
    plain = plain_settings(task)
    assert "abc" not in to_toml({"settings": plain})
    for name in ("inner", "options"):
        with pytest.raises(WrongUse, match=f"{name} is a secret"):
            make_task(Nested, {name: plain[name]})
