"""Proofs on disk: which layouts of which code have been shown to train like one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from phalanx import user_code
from phalanx.folder_files import left_out, read_object
from phalanx.layout import Layout
from phalanx.run import MOST_PROOF
from phalanx.task import Task

FREE = {
    "seed", "steps", "epochs", "precision", "learning_rate", "warmup_steps", "rate", "weight_decay", "clip",
    "layer_decay", "workers", "evaluate_every", "global_batch", "bad_rows",
}  # fmt: skip
"""Settings that a proof does not hang on."""


def record(task: type[Task], files: Mapping[str, str]) -> dict[str, Any]:
    """What a proof of this task is a proof of: its class, and the ``files`` of the user's that were imported for it."""
    return {
        "class": task.__name__, "from": _origin(task), "code": user_code.joined(files), "phalanx": user_code.own_hash(),
        "files": dict(files),
    }  # fmt: skip


def _origin(task: type[Task]) -> str:
    """Where a class comes from: a file of the user's by its name, or a module."""
    file = user_code.file_of(task)
    return task.__module__ if file is None else file.name


def _holds_now(proof: Mapping[str, Any], task: type[Task]) -> bool:
    """Whether a proof is one of this task, and of the code as it is now."""
    files = proof.get("files")
    if proof.get("class") != task.__name__ or proof.get("from") != _origin(task) or proof.get("inject"):
        return False
    if proof.get("phalanx") != user_code.own_hash() or not isinstance(files, dict):
        return False
    try:
        return not user_code.changed(files, user_code.home(task))
    except (ValueError, OSError):  # names that no file can have
        return False


def said(task: Task, settings: Mapping[str, Any], layout: Layout, folders: Sequence[Path], reference: str) -> str:
    """One line: whether this layout of this code has been proven; of one device, nothing."""
    wanted = _plain(layout)
    for path, proof, verdicts in _proofs(folders):
        if verdicts.get(wanted) not in ("equal", "differs") or not _holds_now(proof, type(task)):
            continue
        if verdicts[wanted] != "equal":
            return f"NOT like one device: {wanted} differs in {path.parent}"
        then = proof["settings"]
        other = [n for n, v in settings.items() if n not in FREE and then.get(n) != v]
        if other:
            here, there = (", ".join(f"{n}={of.get(n)}" for n in other) for of in (settings, then))
            again = " ".join(f"--set {n}={settings[n]}" for n in other)
            return f"not proven with {here}, only with {there}; phalanx prove {reference} {again} --layouts {wanted}"
        narrow = f" and {proof['dtype']}" if proof.get("dtype") else ""
        rest = "" if task.precision in ("fp32", "float64", proof.get("dtype")) else f", {task.precision} was not tried"
        return f"{wanted} trains like one device in float64{narrow}{rest}: {path.parent}, code {proof.get('code')}"
    if layout.world == 1:
        return ""
    return (
        f"not proven for this code; phalanx prove {' '.join([reference, *_chosen(task, settings)])} --layouts {wanted}"
    )


def _chosen(task: Task, settings: Mapping[str, Any]) -> Iterator[str]:
    """Settings that are not as they are by default, as a command has them."""
    for field in fields(task):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        value = settings.get(field.name, default)
        if field.name not in FREE and value != (list(default) if isinstance(default, tuple) else default):
            yield f"--set {field.name}={value}"


def _plain(layout: Layout) -> Layout:
    return replace(layout, micro_batch=None)


def _proofs(folders: Sequence[Path]) -> Iterator[tuple[Path, dict[str, Any], dict[Layout, str]]]:
    """With the verdict on each layout, the newest first; what cannot be read, or is none of ours, is none."""
    found = []
    for path in (path for folder in folders for path in folder.glob("*/proof.json")):
        with left_out():
            proof = read_object(path.parent, path, MOST_PROOF)
            if isinstance(proof.get("settings"), dict):
                found.append((path.stat().st_mtime, path, proof))
    for _, path, proof in sorted(found, key=lambda entry: -entry[0]):
        yield path, proof, _verdicts(proof.get("results"))


def _verdicts(results: Any) -> dict[Layout, str]:
    """What a proof says of layouts; of those that this version has no words for, nothing."""
    verdicts = {}
    for result in results if isinstance(results, list) else ():
        with suppress(ValueError, ArithmeticError, LookupError, TypeError, AttributeError):
            verdicts[_plain(Layout.parse(result["layout"]))] = str(result["verdict"])
    return verdicts
