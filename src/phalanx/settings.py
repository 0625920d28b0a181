"""From text to a task's settings, and back: ``--set name=value`` typed and checked against its fields."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from phalanx.errors import WrongUse, closest
from phalanx.layout import CHOICES, DEGREES, Layout
from phalanx.redact import is_redacted, learn, learn_task, learn_words, redact_field
from phalanx.task import Task
from phalanx.toml import from_toml, to_toml

ELSEWHERE = {
    "r": "lora", "lora_r": "lora", "lora_rank": "lora", "alpha": "lora_alpha", "target_modules": "lora_targets",
    "lr": "learning_rate", "batch_size": "global_batch", "train_batch_size": "global_batch",
    "per_device_train_batch_size": "global_batch", "num_epochs": "epochs", "num_train_epochs": "epochs",
    "max_steps": "steps", "max_length": "length", "max_seq_length": "length", "block_size": "length",
    "load_in_4bit": "four_bit", "model": "base", "model_name": "base", "model_name_or_path": "base", "dataset": "path",
    "dataset_name": "path", "train_file": "path", "bf16": "precision", "fp16": "precision",
    "drop_last": "last_batch", "dataloader_drop_last": "last_batch", "num_workers": "workers",
    "dataloader_num_workers": "workers",
}  # fmt: skip
"""What other libraries call settings of ours."""
LAYOUT = {field.name for field in dataclasses.fields(Layout)}
"""What is no setting of a task, but of how it is spread."""


class NotPlain(ValueError):
    """A value that text cannot say."""


def plain_settings(task: Task) -> dict[str, Any]:
    """A task's fields, as far as text can set them, without secrets: each reads back as it is."""
    found = {}
    hints = _hints(type(task))
    for field in dataclasses.fields(task):
        value = getattr(task, field.name)
        with suppress(NotPlain):
            if field.init:
                found[field.name] = redact_field(field.name, _plain_field(value, hints.get(field.name, Any)))
    return found


def unwritten(task: Task) -> list[str]:
    """The fields that `plain_settings` has no words for."""
    known = plain_settings(task)
    return [field.name for field in dataclasses.fields(task) if field.init and field.name not in known]


def _hints(kind: type) -> dict[str, Any]:
    try:
        return get_type_hints(kind)
    except Exception:  # names that are there for a type checker only
        return {}


def _plain_field(value: Any, hint: Any) -> Any:
    if value is None:
        return "none"
    if hint is float and type(value) is int:
        return float(value)  # as it reads back
    text = _plain(value)
    if isinstance(text, (dict, list)):  # it may hold what the field's type does not tell: an enum in a bare dict
        try:
            same = bool(_convert(from_toml(to_toml({"": {"": text}}))[""][""], hint) == value)
        except Exception:
            same = False
        if not same:
            raise NotPlain
    return text


def _plain(value: Any) -> Any:
    """A value in the words of TOML and JSON."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(item) for item in value), key=repr)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = {f: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        return {f.name: _plain(item) for f, item in held.items() if item is not None or f.default is not None}
    raise NotPlain


def make_task(kind: type[Task], values: Mapping[str, Any]) -> Task:
    """A task with these fields; text is converted to each field's type, unknown names are refused."""
    learn(values)
    hints = task_fields(kind)
    resolved = {}
    for name, value in values.items():
        if name not in hints:
            raise WrongUse(f"{kind.__name__} has no field {name!r}; {_meant(name, value, hints)}")
        if is_redacted(name, value):
            raise WrongUse(f"{name} is a secret, which no run.toml holds. Give it again: --set {name}=...")
        resolved[name] = convert(value, hints[name], name)
    needed = [f.name for f in dataclasses.fields(kind) if _required(f) and f.name not in resolved]
    if needed:
        raise WrongUse(f"{kind.__name__} needs {', '.join(needed)}. Set it: --set {needed[0]}=...")
    task = kind(**resolved)
    learn_task(task)
    task.check()
    return task


def _meant(name: str, value: Any, fields: Mapping[str, Any]) -> str:
    """A clause that points at the field that does what this name does elsewhere, at the layout, or at the nearest."""
    if with_it := _in_layout(name, value):
        return f"it is part of a layout, as in --layout {with_it} (of prove: --layouts)"
    own = ELSEWHERE.get(name, "")
    if own not in fields:
        return closest(name, fields)
    return f"here it is {own!r}{_counted(own)}: --set {own}={_here(name, value) or '...'}"


def given_as(kind: type[Task], name: str, value: str, layout: str = "--layout") -> str:
    """How to give what somebody has taken for an option, as a clause; "": it is nothing that is known here.

    ``layout``: the option that takes layouts.
    """
    fields = task_fields(kind)
    own = name if name in fields else ELSEWHERE.get(name, "")
    if own in fields:
        return f"a setting of {kind.__name__}{_counted(own)}: --set {own}={_here(name, value) or value}"
    with_it = _in_layout(name, value)
    return f"part of a layout: {layout} {with_it}" if with_it else ""


def _in_layout(name: str, value: Any) -> str:
    """A layout with this in it; "": it is no part of one."""
    if name not in LAYOUT or (name in CHOICES and value not in CHOICES[name]):
        return ""
    return f"{name}={value}" if name in DEGREES else f"dp=2,{name}={value}"


def _here(name: str, value: Any) -> str:
    """What a value is called here, where that is something else."""
    if ELSEWHERE.get(name) != "last_batch":
        return ""
    return "keep" if TRUTHS.get(str(value).lower()) is False else "drop"


def _counted(own: str) -> str:
    return ", which counts the samples of a step on all ranks together" if own == "global_batch" else ""


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def task_fields(kind: type[Task]) -> dict[str, Any]:
    """The settable fields of a task class with their types."""
    hints = get_type_hints(kind)
    names = [f.name for f in dataclasses.fields(kind) if f.init]
    bare = [n for n in inspect.get_annotations(kind) if n not in names and "ClassVar" not in str(hints.get(n))]
    if bare:
        raise WrongUse(f"{kind.__name__} declares {bare[0]!r} but is not a dataclass. Put @dataclass above the class.")
    return {name: hints[name] for name in names}


def parse_assignments(texts: Sequence[str]) -> dict[str, str]:
    """``["width=128", ...]`` as a dict."""
    learn_words(texts)
    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise WrongUse(f"--set {text!r} is not name=value. Write it like --set width=128.")
        values[name.strip()] = value
    return values


def over(saved: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that are given now, before saved ones; steps and epochs take each other's place."""
    values = {**saved, **given}
    if "steps" in given and "epochs" not in given:
        values["epochs"] = 0
    elif "steps" not in given and float(values.get("epochs", 0) or 0):
        values.pop("steps", None)  # they follow from the epochs
    return values


def convert(value: Any, hint: Any, name: str) -> Any:
    """``value``, text or already typed, as the type a field declares."""
    try:
        return _convert(value, hint)
    except WrongUse as refusal:
        raise WrongUse(f"{name}: {refusal}") from None
    except (ValueError, TypeError, OverflowError):
        raise WrongUse(f"{name}={value!r} is not {_describe(hint)}. Give {name} such a value.") from None


SEQUENCES: dict[Any, Any] = {list: list, tuple: tuple, set: set, frozenset: frozenset, Sequence: list}
MAPPINGS: tuple[Any, ...] = (dict, Mapping)
DTYPES = {str(found).removeprefix("torch."): found for found in vars(torch).values() if isinstance(found, torch.dtype)}
TRUTHS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def _convert(value: Any, hint: Any) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _convert_union(value, args)
    if origin is Literal:
        return _pick({str(choice): choice for choice in args}, value)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else _convert_dataclass(_mapping(value), hint)
    if origin in MAPPINGS or hint in MAPPINGS:
        of_name, of_item = args or (Any, Any)
        return {_convert(name, of_name): _convert(item, of_item) for name, item in _mapping(value).items()}
    if origin in SEQUENCES or hint in SEQUENCES:
        return _convert_sequence(_items(value), origin or hint, args)
    if hint is torch.dtype:
        return value if isinstance(value, torch.dtype) else _pick(DTYPES, str(value).removeprefix("torch."))
    if hint is bool:
        return _pick(TRUTHS, str(value).lower())
    if hint is int:
        return _whole(value)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _pick({member.name: member for member in hint} | {str(member.value): member for member in hint}, value)
    return hint(value)


def _convert_sequence(items: list[Any], kind: Any, args: tuple[Any, ...]) -> Any:
    if kind is tuple and args and args[-1] is not Ellipsis:
        if len(items) != len(args):
            raise ValueError(items)
        return tuple(_convert(item, hint) for item, hint in zip(items, args, strict=True))
    return SEQUENCES[kind](_convert(item, args[0] if args else Any) for item in items)


def _convert_dataclass(given: Mapping[str, Any], kind: type) -> Any:
    hints = _hints(kind)
    known = [f.name for f in dataclasses.fields(kind) if f.init]
    for name in given:
        if name not in known:
            raise WrongUse(f"{kind.__name__} has no field {name!r}; {closest(name, known)}")
    return kind(**{name: convert(item, hints.get(name, Any), name) for name, item in given.items()})


def _convert_union(value: Any, options: tuple[Any, ...]) -> Any:
    if type(None) in options and (value is None or str(value).lower() == "none"):
        return None
    for option in options:
        try:
            return _convert(value, option)
        except (ValueError, TypeError, OverflowError):
            continue
    raise ValueError(value)


def _pick(choices: Mapping[str, Any], value: Any) -> Any:
    if str(value) not in choices:
        raise ValueError(value)
    return choices[str(value)]


def _mapping(value: Any) -> Mapping[str, Any]:
    """What a table says; text says it in JSON."""
    found = json.loads(value) if isinstance(value, str) else value
    if not isinstance(found, Mapping):
        raise ValueError(value)
    return found


def _items(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    return [part.strip() for part in str(value).strip("[]()").split(",") if part.strip()]


def _whole(value: Any) -> int:
    """An int from ``1000``, ``1_000`` or ``1e3``; never from a fraction."""
    if isinstance(value, str) and ("e" in value.lower() or "." in value):
        value = float(value)
    if isinstance(value, bool) or (int(value) != value and not isinstance(value, str)):
        raise ValueError(value)
    return int(value)


def _describe(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of: " + ", ".join(map(str, get_args(hint)))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "one of: " + ", ".join(hint.__members__)
    if (get_origin(hint) or hint) in MAPPINGS:
        return 'a table, in JSON as in {"name": value}'
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return words.get(hint, getattr(hint, "__name__", str(hint)) if not get_args(hint) else str(hint))
