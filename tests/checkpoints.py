"""Checkpoints for tests: a task trained under a layout, from one folder to another."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

import phalanx
from phalanx import Layout
from phalanx.checkpoint.manager import Checkpoint, CheckpointManager
from phalanx.checkpoint.store import open_store
from phalanx.train.checkpointing import Checkpointer
from phalanx.train.engine import Engine
from phalanx.train.policy import Policy
from phalanx.train.restoring import Restorer

ONLY_WHEN_ASKED = Policy(memory_steps=0, minutes=0)


def manager_at(folder: Path | str) -> CheckpointManager:
    return CheckpointManager(open_store(folder))


@contextmanager
def checkpointing(
    engine: Engine, folder: Path | str, policy: Policy = ONLY_WHEN_ASKED, **options: Any
) -> Iterator[Checkpointer]:
    checkpointer = Checkpointer(engine, manager_at(folder), policy, **options)
    try:
        yield checkpointer
    finally:
        checkpointer.close()


def trained(
    task: phalanx.Task, layout: str, to: Path | str | None, start: Path | str | None = None, steps: int = 0
) -> list[float]:
    """Take up the state in ``start``, do so many steps, save; the losses of these steps."""
    with Engine(task, Layout.parse(layout), device="cpu") as engine:
        if start is not None:
            assert Restorer(engine, manager_at(start)).restore() is not None
        losses = [engine.step(batch).loss for batch in islice(engine.batches(), steps)]
        if to is not None:
            with checkpointing(engine, to) as checkpointer:
                checkpointer.save_now()
        return losses


def newest(folder: Path | str) -> Checkpoint:
    manager = manager_at(folder)
    return manager.open(max(manager.steps()))


def contents(folder: Path | str) -> dict[str, Tensor]:
    """All tensors of the newest checkpoint, whole."""
    checkpoint = newest(folder)
    return {name: checkpoint.tensor(name) for name in checkpoint.manifest.tensors}


def rewritten(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a description says, with a checksum that is right again."""
    found = json.loads(file.read_bytes())
    del found["crc32"]
    change(found)
    text = json.dumps(found, separators=(",", ":"))
    file.write_text(f'{text[:-1]},"crc32":"{zlib.crc32(text.encode()):08x}"}}\n')


def as_older(step: Path) -> None:
    """Make a checkpoint one of format 2, which older versions wrote: without hashes of its parts."""
    rewritten(step / "manifest.json", lambda found: found.update(format=2, children=list(found["children"])))


def exchange_part(step: Path, other: Path, rank: int = 1) -> None:
    """Put a rank's part of another checkpoint into the place of this one's."""
    for ending in ("json", "safetensors"):
        shutil.copyfile(other / f"part-{rank:05d}.{ending}", step / f"part-{rank:05d}.{ending}")
