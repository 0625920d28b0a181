"""Names that a task has and nobody asks for: a setting that nothing reads, a method that is nearly one of a task's."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from phalanx import user_code
from phalanx.task import Task
from phalanx.train.check import lines

NEAR = 0.75
OTHERWISE = {
    "lr": "learning_rate", "batch_size": "global_batch", "max_steps": "steps", "num_workers": "workers",
    "max_epochs": "epochs", "num_epochs": "epochs", "grad_clip": "clip", "dtype": "precision", "decay": "weight_decay",
    "scheduler": "rate", "lr_scheduler": "rate", "lr_scheduler_type": "rate", "layerwise_decay": "layer_decay",
    "param_groups": "parameters", "parameter_groups": "parameters", "drop_last": "last_batch",
}  # fmt: skip
"""What settings are called elsewhere."""


def check_names(task: Task) -> list[str]:
    """What is written down in a task and has no effect, as far as that can be told; a line each."""
    kinds = [kind for kind in type(task).__mro__ if kind is not Task and issubclass(kind, Task)]
    kinds = [kind for kind in kinds if user_code.file_of(kind) is not None]
    text, own = _text(user_code.modules().values()), _text(filter(None, map(user_code.file_of, kinds)))
    if not own or re.search(r"\basdict\(|\bvars\(self\)|\breplace\(self|__dict__", own):  # all of them are read at once
        return []
    others = [kind for kind in type(task).__mro__ if kind not in kinds]
    known = {field.name for kind in others if dataclasses.is_dataclass(kind) for field in dataclasses.fields(kind)}
    ours = {field.name for field in dataclasses.fields(Task)}
    found = []
    for field in dataclasses.fields(task):
        if field.name not in known and not _read(field.name, text):
            meant = _meant(field.name, ours)
            found.append(
                f"{field.name} is a setting of {type(task).__name__} that nothing reads{lines.at(lines.of(type(task)))}"
                f"{f': {meant} is what a task has' if meant else ''}."
            )
    methods = {name for name, value in vars(Task).items() if inspect.isfunction(value) and not name.startswith("_")}
    for kind in kinds:
        for name, value in vars(kind).items():
            if not inspect.isfunction(value) or name.startswith("_") or _read(name, text):
                continue
            if any(hasattr(other, name) for other in others):
                continue
            if meant := _meant(name, methods):
                found.append(f"nothing calls {kind.__name__}.{name}{lines.at(lines.of(value))}: a task has {meant}().")
    return found


def _text(files: Iterable[Path]) -> str:
    """All that these files say."""
    parts = []
    for path in set(files):
        with suppress(OSError, UnicodeDecodeError):
            parts.append(path.read_text(encoding="utf-8"))
    return "\n".join(parts)


def _read(name: str, text: str) -> bool:
    """Whether anything may read an attribute, by its name or by a text that is its name."""
    return bool(re.search(rf"\.{name}\b|['\"]{name}['\"]", text))


def _meant(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=NEAR)
    return OTHERWISE.get(name, near[0] if near else "") if OTHERWISE.get(name, "") in {"", *known} else ""
