"""A run's weights for others: safetensors files, or a folder that Hugging Face's ``from_pretrained`` reads.

Written a tensor at a time, each checked as it is read from the checkpoint; the model is never whole in memory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from phalanx.checkpoint.manager import Checkpoint
from phalanx.checkpoint.manifest import Held
from phalanx.checkpoint.weights import header, raw_bytes
from phalanx.errors import CannotHere, WrongUse

SHARD_BYTES = 4 << 30
TOKENIZER = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "*.model", "added_tokens.json",
             "chat_template*")  # fmt: skip

Progress = Callable[[int, int], None]


def export(
    checkpoint: Checkpoint,
    to: Path,
    config: Any = None,
    beside: Path | None = None,
    progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Write a checkpoint's weights into the new folder ``to``; with a ``config`` of Hugging Face's, as its folder.

    ``beside`` is where the model came from, whose tokenizer goes along.
    """
    place = to.resolve()
    try:
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise WrongUse(f"{to} is there and not an empty folder. Give another folder to export to, or empty it.")
        place.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".exporting-", dir=place.parent) as aside:
            unfinished = Path(aside) / "weights"
            unfinished.mkdir()
            _write(checkpoint, unfinished, shard_bytes, progress)
            if config is not None:
                _describe(checkpoint, unfinished, config, beside)
            unfinished.rename(place)  # which is not there, or empty still
    except OSError as error:
        raise CannotHere(f"{to} cannot be written: {error.strerror or error}. Make room, or give another.") from None
    return sorted(to.iterdir())


def _write(checkpoint: Checkpoint, folder: Path, shard_bytes: int, progress: Progress | None) -> None:
    """The weights, in as many files as they need."""
    tensors = {n.removeprefix("model/"): t for n, t in checkpoint.manifest.tensors.items() if n.startswith("model/")}
    shards = list(_shards(tensors, shard_bytes))
    names = ["model.safetensors"] if len(shards) == 1 else [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)
    ]  # fmt: skip
    done, total = 0, sum(_size(held) for held in tensors.values())
    for file, shard in zip(names, shards, strict=True):
        described = [(name, getattr(torch, tensors[name].dtype), tensors[name].shape) for name in shard]
        with (folder / file).open("wb") as out:
            out.write(header(described, {"format": "pt", "tied": json.dumps(checkpoint.manifest.facts["tied"])}))
            for name in shard:
                out.write(raw_bytes(checkpoint.tensor(f"model/{name}")))
                done += _size(tensors[name])
                if progress is not None:
                    progress(done, total)
            out.flush()
            os.fsync(out.fileno())
    if len(shards) > 1:
        places = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _describe(checkpoint: Checkpoint, folder: Path, config: Any, beside: Path | None) -> None:
    """What Hugging Face wants to know of a model, and its tokenizer."""
    weights = [held for name, held in checkpoint.manifest.tensors.items() if name.startswith("model/")]
    config.dtype = max(weights, key=_size).dtype  # or from_pretrained would round to what it came with
    config.save_pretrained(folder)
    for pattern in TOKENIZER if beside is not None and beside.is_dir() else ():
        for found in beside.glob(pattern) if beside else ():
            shutil.copy(found, folder / found.name)


def _shards(tensors: dict[str, Held], most: int) -> Iterator[list[str]]:
    shard: list[str] = []
    size = 0
    for name, held in tensors.items():
        if shard and size + _size(held) > most:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += _size(held)
    yield shard


def _size(held: Held) -> int:
    return torch.Size(held.shape).numel() * getattr(torch, held.dtype).itemsize
