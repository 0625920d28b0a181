"""Proofs on disk: which layouts of which code have been shown to train like one device."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.errors import WrongUse
from phalanx.layout import Layout
from phalanx.task import Task

FREE = {
    "seed", "steps", "precision", "learning_rate", "warmup_steps", "weight_decay", "clip", "workers", "evaluate_every",
    "global_batch",
}  # fmt: skip
"""Settings that a proof does not hang on."""


def code_hash(task: type[Task]) -> str:
    """Of Phalanx's own source, and of the files beside those that the task's classes are in."""
    own = Path(__file__).parent
    files = sorted(own.rglob("*.py"))
    for kind in task.__mro__:
        try:
            file = Path(inspect.getfile(kind)).resolve()
        except (TypeError, OSError):
            continue
        if file.suffix == ".py" and not file.is_relative_to(own) and "site-packages" not in file.parts:
            files += [file, *sorted(file.parent.glob("*.py"))]
    found = hashlib.sha256()
    for file in dict.fromkeys(files):
        with suppress(OSError):  # it cannot be imported either
            found.update(file.read_bytes() if file.is_file() else b"")  # an editor leaves links to nowhere
    return found.hexdigest()[:16]


def said(task: Task, settings: Mapping[str, Any], layout: Layout, folder: Path, reference: str) -> str:
    """One line: whether this layout of this code has been proven."""
    code, wanted = code_hash(type(task)), _plain(layout)
    for path, proof, verdicts in _proofs(folder):
        if proof.get("class") != type(task).__name__ or proof.get("inject"):
            continue
        if verdicts.get(wanted) in (None, "not applicable") or proof.get("code") != code:
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
        return f"{wanted} trains like one device in float64{narrow}{rest}: {path.parent}, code {code}"
    return f"not proven for this code ({code}); phalanx prove {reference} --layouts {wanted}"


def _plain(layout: Layout) -> Layout:
    return replace(layout, micro_batch=None)


def _proofs(folder: Path) -> Iterator[tuple[Path, dict[str, Any], dict[Layout, str]]]:
    """With the verdict on each layout, the newest first; what cannot be read, or is none of ours, is none."""
    found = []
    for path in folder.glob("*/proof.json"):
        with suppress(OSError, ValueError, RecursionError):
            proof = json.loads(path.read_text()) if path.is_file() else None
            if isinstance(proof, dict) and isinstance(proof.get("settings"), dict):
                found.append((path.stat().st_mtime, path, proof))
    for _, path, proof in sorted(found, key=lambda entry: -entry[0]):
        yield path, proof, _verdicts(proof.get("results"))


def _verdicts(results: Any) -> dict[Layout, str]:
    """What a proof says of layouts; of those that this version has no words for, nothing."""
    verdicts = {}
    for result in results if isinstance(results, list) else ():
        with suppress(WrongUse, LookupError, TypeError, AttributeError):
            verdicts[_plain(Layout.parse(result["layout"]))] = str(result["verdict"])
    return verdicts
