"""Weights to start from: a folder of safetensors files, of which a rank reads its part of one weight at a time."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from phalanx import streams
from phalanx.checkpoint.weights import DTYPES
from phalanx.errors import WrongUse, closest
from phalanx.events import say
from phalanx.parallel.axes.cuts import Cut
from phalanx.parallel.weights.filling import Saved
from phalanx.task import Task
from phalanx.trees import leaves
from phalanx.words import listed

HEADS = ("lm_head", "embed_out", "cls", "predictions", "pooler", "score", "classifier", "classification_head")
"""Modules that models of Hugging Face's end in, by what they are for."""

STACKED = {"gate_up_proj": ("gate_proj|w1", "up_proj|w3"), "down_proj": ("down_proj|w2",)}
"""What experts' stacked weights are called, and the files' names for what one expert has of them."""
RENAMED = (("mlp.", "block_sparse_moe."),)


def _unnumbered(name: str) -> str:
    """A name without its numbers, which layers of one kind share."""
    return re.sub(r"\d+", "*", name)


def _kind(dtype: str) -> str:
    """Of a dtype as safetensors files name it."""
    return {"F": "real", "B": "real", "C": "complex"}.get("I" if dtype == "BOOL" else dtype[0], "whole")


def beginning(path: str | Path | Mapping[str, Path], model: nn.Module, tied: Mapping[str, str], task: Task) -> Saved:
    """Where a described model's weights begin: in a folder, but for those that the task has added to it.

    Or in several, each with the names that begin in one way; what is in none of them begins as it is made.
    """
    paths = path if isinstance(path, Mapping) else {"": Path(path)}
    kept, found = set(model.state_dict(keep_vars=True)), dict[str, Pretrained]()
    tensors = {n: t for n, t in [*model.named_parameters(), *model.named_buffers()] if n in kept}
    home = partial(_home, paths)
    for prefix, folder in paths.items():
        own = {n.removeprefix(prefix): t for n, t in tensors.items() if home(n) == prefix}
        ties = {n.removeprefix(prefix): first.removeprefix(prefix) for n, first in tied.items() if home(n) == prefix}
        shapes, dtypes = ({n: getattr(t, what) for n, t in own.items()} for what in ("shape", "dtype"))
        found[prefix] = Pretrained(folder, shapes, ties, dtypes, partial(_added, task, prefix))

    def part(name: str, cut: Cut | None, rank: int) -> Tensor | None:
        prefix = home(name)
        if prefix is None:
            return None
        held, inner = found[prefix], name.removeprefix(prefix)
        if held.has(inner):
            return held.part(inner, cut, rank)
        made = task.begins(name, held.whole)
        if made is not None and made.shape != tensors[name].shape:
            raise WrongUse(
                f"{name} would begin as a tensor of shape {tuple(made.shape)}, and has {tuple(tensors[name].shape)} in "
                "the model. Build the model as what it begins from was."
            )
        return made if made is None or cut is None else cut.take(made, rank)

    return part


def _tell_unused(path: str | Path, names: Sequence[str]) -> None:
    """Of tensors in files that a model does not take, once: that a head is another one's is meant so."""
    if os.environ.get("RANK", "0") != "0":
        return
    heads = all(any(word in name.split(".") for word in HEADS) for name in names)
    what = "what the saved model ends in is not used" if heads else "the model has no place for some of its tensors"
    say(f"   note  {path}: {what} ({listed(list(names), 3)})", streams.stderr())


def _home(paths: Mapping[str, Path], name: str) -> str | None:
    """The longest beginning of a name that there is a folder for."""
    return max((prefix for prefix in paths if name.startswith(prefix)), key=len, default=None)


def _added(task: Task, prefix: str, name: str) -> bool:
    return task.added(prefix + name)


class Pretrained:
    """Tensors by the model's own names, spread over one file or several."""

    def __init__(
        self,
        path: str | Path,
        shapes: Mapping[str, torch.Size],
        tied: Mapping[str, str],
        dtypes: Mapping[str, torch.dtype] | None = None,
        added: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """``shapes`` are the weights and buffers that must be there; shared ones may stand under any of their names.

        Those that were ``added`` to the model may be missing, all of them.
        Where ``dtypes`` says what they are, whole, real and complex numbers do not stand in for each other.
        """
        self.path, self.shapes = Path(path), shapes
        if not self.path.exists():
            raise WrongUse(f"there is no {path} to begin from. Check --init-from, or Task.pretrained.")
        if (self.path / "final" / "model.safetensors").is_file():
            self.path /= "final"  # a run's folder
        files = [self.path] if self.path.is_file() else sorted(self.path.glob("*.safetensors"))
        if self.path.name == "final" and self.path / "model.safetensors" in files:
            files = [self.path / "model.safetensors"]  # an average of its weights may lie beside it
        if not files:
            raise WrongUse(f"there is no .safetensors file in {path}. Give the folder of a saved model, or its file.")
        self._files: dict[str, Path] = {}
        for file in files:
            try:
                with safe_open(file, framework="pt") as opened:
                    names = list(opened.keys())
            except SafetensorError as error:
                raise WrongUse(f"{file} is not a whole safetensors file ({error}). Save or copy it again.") from error
            twice = next((name for name in names if name in self._files), None)
            if twice is not None:
                raise WrongUse(
                    f"{twice} is in {self._files[twice].name} and in {file.name} of {path}, and which is meant "
                    "cannot be told. Take one of them away, or give the file."
                )
            self._files |= dict.fromkeys(names, file)
        old = [name for name in shapes if not added(name)]
        needed = old if not any(name in self._files for name in shapes if added(name)) else list(shapes)
        self._names = {name: self._find(name, [n for n, first in tied.items() if first == name]) for name in needed}
        for name, shape in ((name, shapes[name]) for name in needed):
            found = self._shape(self._names[name])
            if found != shape:
                raise WrongUse(
                    f"{name} has shape {tuple(found)} in {path} and {tuple(shape)} in the model. "
                    "Build the model as the saved one was."
                )
        for name, dtype in ((n, d) for n, d in (dtypes or {}).items() if n in self._names):
            for stored in leaves(self._names[name], str):
                found_kind, kind = _kind(self._dtype(stored)), _kind(DTYPES.get(dtype, "F"))
                if found_kind != kind:
                    raise WrongUse(
                        f"{stored} holds {found_kind} numbers in {path}, and {name} of the model {kind} ones. "
                        "Convert it, or build the model as the saved one was."
                    )
        changed = {name.rpartition(".")[0] for name in shapes if added(name)}  # modules that keep something else
        left = sorted(self._files.keys() - set(leaves(self._names, str)) - set(tied))
        left = [name for name in left if name.rpartition(".")[0] not in changed]
        numbered = {_unnumbered(name) for name in self._names}
        beyond = next((name for name in left if _unnumbered(name) in numbered), None)
        if beyond is not None:
            raise WrongUse(f"{path} holds {beyond}, and the model ends before it. Build it as the saved one was.")
        if left:
            _tell_unused(path, left)

    def whole(self, name: str) -> Tensor:
        """A tensor that is there, whether or not the model has one of its name."""
        if name not in self._names:
            self._names[name] = self._find(name, [])
        return self.part(name, None, 0)

    def has(self, name: str) -> bool:
        """Whether it is there: all but what was added always are."""
        return name in self._names

    def _find(self, name: str, others: list[str]) -> str | list[list[str]]:
        """Its name in the files; of a stacked weight, by expert the names of what is laid one after another."""
        for wanted in (name, *others):
            renamed = [wanted.replace(here, there) for here, there in RENAMED]
            for known in (wanted, *renamed, wanted.partition(".")[2]):  # a body may have been saved without its head
                if known in self._files:
                    return known
        owner, _, last = name.rpartition(".")
        for prefix in (owner, *(owner.replace(here, there) for here, there in RENAMED)):
            parts = [self._experts(prefix, part) for part in STACKED.get(last, ())]
            if parts and all(len(part) == self.shapes[name][0] for part in parts):
                return [list(expert) for expert in zip(*parts, strict=True)]
        raise WrongUse(f"{self.path} has no {name}; {closest(name, self._files)}")

    def _experts(self, prefix: str, part: str) -> list[str]:
        found = [
            (m, name)
            for name in self._files
            if (m := re.fullmatch(rf"{re.escape(prefix)}\.(\d+)\.({part})\.weight", name))
        ]
        return [name for _, name in sorted((int(match[1]), name) for match, name in found)]

    def _shape(self, name: str | Sequence[Sequence[str]]) -> torch.Size:
        if not isinstance(name, str):
            rows = sum(self._shape(part)[0] for part in name[0])
            return torch.Size([len(name), rows, *self._shape(name[0][0])[1:]])
        with safe_open(self._files[name], framework="pt") as opened:
            return torch.Size(opened.get_slice(name).get_shape())

    def _dtype(self, name: str) -> str:
        with safe_open(self._files[name], framework="pt") as opened:
            return opened.get_slice(name).get_dtype()

    def part(self, name: str, cut: Cut | None, rank: int) -> Tensor:
        """A rank's part of a weight, of which no more is read."""
        stored = self._names[name]
        if isinstance(stored, str):
            return self._read(stored, cut, rank)
        experts = range(len(stored)) if cut is None else [e for a, b in cut.spans[rank] for e in range(a, b)]
        return torch.stack([torch.cat([self._read(part, None, 0) for part in stored[expert]]) for expert in experts])

    def _read(self, name: str, cut: Cut | None, rank: int) -> Tensor:
        with safe_open(self._files[name], framework="pt") as opened:
            if cut is None:
                return opened.get_tensor(name)
            stored = opened.get_slice(name)
            every = [slice(None)] * len(stored.get_shape())
            spans = [(*every[: cut.dim], slice(a, b), *every[cut.dim + 1 :]) for a, b in cut.spans[rank]]
            return torch.cat([stored[span] for span in spans], cut.dim)
