"""A run's weights for others: safetensors files, a file for ``torch.load``, or a folder of Hugging Face's.

Written a tensor at a time, each checked as it is read from the checkpoint; the model is never whole in memory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.manager import Checkpoint
from phalanx.checkpoint.manifest import Held
from phalanx.checkpoint.weights import header, raw_bytes
from phalanx.errors import CannotHere, WrongUse

SHARD_BYTES = 4 << 30
ALONG = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "*.model",
         "added_tokens.json", "chat_template*")  # fmt: skip
"""Files of the folder that a model came from: how it ends and samples texts, and its tokenizer."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Selection:
    """Which weights of a checkpoint are written, under which names, and as what."""

    names: Mapping[str, str]
    """By the name in the files, the weight's own."""
    made: Callable[[Checkpoint, str], Tensor] = lambda checkpoint, name: checkpoint.tensor(f"model/{name}")
    """What is written for a weight, in its dtype and shape."""
    file: str = "model"
    new: Mapping[str, Held] = field(default_factory=dict)
    """What those are that the checkpoint does not have, by their own names: they are made of others."""

    def without(self, modules: Sequence[str]) -> Selection:
        """Those that are in none of some modules."""
        inside = tuple(f"{module}." for module in modules)
        return replace(self, names={name: own for name, own in self.names.items() if not own.startswith(inside)})


def export(
    checkpoint: Checkpoint,
    to: Path,
    config: Any = None,
    beside: Path | None = None,
    progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
    selection: Selection | None = None,
    along: Callable[[Path], None] = lambda folder: None,
    pt: bool = False,
) -> list[Path]:
    """Write a checkpoint's weights into the new folder ``to``; with a ``config`` of Hugging Face's, as its folder.

    ``beside`` is where the model came from, whose tokenizer and settings of generation go along. ``selection``: other
    than all weights as they are. ``along`` writes what else belongs there. ``pt``: as a file for ``torch.load``.
    """
    place = to.resolve()
    try:
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise WrongUse(f"{to} is there and not an empty folder. Give another folder to export to, or empty it.")
        place.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".exporting-", dir=place.parent) as aside:
            unfinished = Path(aside) / "weights"
            unfinished.mkdir()
            selection = selection or everything(checkpoint)
            tensors = _selected(checkpoint, selection)
            if pt:
                _write_pt(checkpoint, unfinished, progress, selection, tensors)
            else:
                _write(checkpoint, unfinished, shard_bytes, progress, selection, tensors)
            if config is not None:
                _describe(tensors, unfinished, config, beside)
            along(unfinished)
            unfinished.rename(place)  # which is not there, or empty still
    except OSError as error:
        raise CannotHere(f"{to} cannot be written: {error.strerror or error}. Make room, or give another.") from None
    return sorted(to.iterdir())


def everything(checkpoint: Checkpoint) -> Selection:
    """All weights, as they are."""
    names = list(checkpoint.manifest.weights())
    return Selection(dict(zip(names, names, strict=True)))


def _selected(checkpoint: Checkpoint, selection: Selection) -> dict[str, Held]:
    """What is written, by its name in the files."""
    weights = {**checkpoint.manifest.weights(), **selection.new}
    return {name: weights[own] for name, own in selection.names.items()}


def _write(
    checkpoint: Checkpoint, folder: Path, shard_bytes: int, progress: Progress | None, selection: Selection,
    tensors: dict[str, Held],
) -> None:  # fmt: skip
    """The weights, in as many files as they need."""
    shards, stem = list(_shards(tensors, shard_bytes)), selection.file
    names = [f"{stem}.safetensors"] if len(shards) == 1 else [
        f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)
    ]  # fmt: skip
    done, total = 0, sum(_size(held) for held in tensors.values())
    for file, shard in zip(names, shards, strict=True):
        described = [(name, getattr(torch, tensors[name].dtype), tensors[name].shape) for name in shard]
        with (folder / file).open("wb") as out:
            out.write(header(described, {"format": "pt", "tied": json.dumps(checkpoint.manifest.facts["tied"])}))
            for name in shard:
                out.write(raw_bytes(selection.made(checkpoint, selection.names[name])))
                done += _size(tensors[name])
                if progress is not None:
                    progress(done, total)
            out.flush()
            os.fsync(out.fileno())
    if len(shards) > 1:
        places = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _write_pt(
    checkpoint: Checkpoint, folder: Path, progress: Progress | None, selection: Selection, tensors: dict[str, Held]
) -> None:
    """A plain state dict as torch.save writes it, with shared weights under all of their names."""
    done, total = 0, sum(_size(held) for held in tensors.values())
    state: dict[str, Tensor] = {}
    with TemporaryDirectory(prefix=".exporting-", dir=folder) as aside:
        for number, (name, held) in enumerate(tensors.items()):  # each in a file, from which torch writes it
            path, dtype = Path(aside) / str(number), getattr(torch, held.dtype)
            path.write_bytes(raw_bytes(selection.made(checkpoint, selection.names[name])))
            count = torch.Size(held.shape).numel()
            mapped = torch.from_file(str(path), False, count, dtype=dtype) if count else torch.empty(0, dtype=dtype)
            state[name] = mapped.view(held.shape)
            done += _size(held)
            if progress is not None:
                progress(done, total)
        tied = checkpoint.manifest.facts["tied"]
        state |= {other: state[first] for other, first in tied.items() if first in state}
        with (folder / f"{selection.file}.pt").open("wb") as out:
            torch.save(state, out)
            out.flush()
            os.fsync(out.fileno())


def _describe(tensors: dict[str, Held], folder: Path, config: Any, beside: Path | None) -> None:
    """What Hugging Face wants to know of a model, and what goes along with it."""
    config.dtype = max(tensors.values(), key=_size).dtype  # or from_pretrained would round to what it came with
    config.save_pretrained(folder)
    for pattern in ALONG if beside is not None and beside.is_dir() else ():
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
