"""A large task made small enough to prove on a laptop, its structure kept: fewer blocks, narrower, shorter."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.data.adopted import adopted
from phalanx.errors import WrongUse
from phalanx.layout import Layout
from phalanx.models.hugging_face import HEAD_WIDTH, smaller
from phalanx.parallel.weights.blueprint import Blueprint
from phalanx.parameters import fitted
from phalanx.task import Task
from phalanx.train.variant import Variant, variant

SMALL_WEIGHTS, SMALL_LENGTH, SHORTEST = 300_000, 32, 6
VOCABULARY, CHUNK = 131, 8
LAYERS = ("layers", "num_layers", "n_layers", "n_layer", "depth", "num_hidden_layers")


@dataclass(frozen=True)
class Needs:
    """What layouts ask of a model."""

    blocks: int = 2
    heads: int = 4

    @classmethod
    def of(cls, layouts: Sequence[Layout]) -> Needs:
        blocks = [layout.stages for layout in layouts]
        return cls(max([2, *blocks]), max([4, *(layout.tp * layout.cp for layout in layouts)]))


class FromConfig(Variant):
    """Stands before a task's own class: its model, from a smaller configuration."""

    model_kind: type[nn.Module]
    model_config: Any

    def model(self) -> nn.Module:
        return self.model_kind(copy.deepcopy(self.model_config))


@dataclass
class Shrunk:
    """A task, and what was done to it."""

    task: Task
    notes: list[str] = field(default_factory=list)
    length: int | None = None
    vocabulary: int | None = None


def shrunk(task: Task, needs: Needs) -> Shrunk:
    """The task itself if it is small; otherwise as its `tiny` makes it, or its Hugging Face configuration."""
    model = Blueprint(task.model, task.seed).model
    weights, length = _weights(model), _length(task)
    looked_up = any(isinstance(module, nn.Embedding) for module in model.modules())
    config = getattr(model, "config", None)
    if weights <= SMALL_WEIGHTS and (length <= SMALL_LENGTH or not looked_up):
        chunks = _chunks(config, length)
        return _with_config(task, model, copy.deepcopy(config), chunks) if chunks else Shrunk(task)
    if callable(own := type(task).tiny) and own is not Task.tiny:
        found = Shrunk(_with_blocks(task, task.tiny(), needs.blocks))
    else:
        found = by_config(task, model, config, needs) if hasattr(config, "num_hidden_layers") else Shrunk(task)
        if length > SMALL_LENGTH and looked_up:
            found.length = SMALL_LENGTH // 2
    now = Blueprint(found.task.model, task.seed).model
    changed = _changes(task, found.task)
    found.task, lost = fitted(found.task, [name for name, each in now.named_parameters() if each.requires_grad])
    changed += lost
    if weights != _weights(now):
        changed.append(f"weights {weights:,} -> {_weights(now):,}")
    if found.length:
        changed.append(f"length {length} -> {found.length}")
    if found.vocabulary:
        changed.append(f"ids folded into {found.vocabulary}")
    if _weights(now) > 10 * SMALL_WEIGHTS:
        raise WrongUse(
            f"{type(task).__name__} has {_weights(now):,} weights, too many to prove it on one machine in float64, and "
            "it is not known how to make it smaller. Give the task a tiny(): a copy of itself with the same structure "
            "and small sizes, e.g. return dataclasses.replace(self, width=32, layers=2)."
        )
    found.notes = [*changed, *found.notes]
    return found


def _weights(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def shortened(task: Task, model: nn.Module) -> int | None:
    """A length at which sequences are few tokens, if they are more."""
    looked_up = any(isinstance(module, nn.Embedding) for module in model.modules())
    return SHORTEST if looked_up and _length(task) > SHORTEST else None


def _length(task: Task) -> int:
    """Of the longest column of a sample that is one whole number after another."""
    sample = adopted(task.data(), task, "data", checked=False)[0]
    columns = [torch.as_tensor(v) for v in sample.values() if isinstance(v, (Tensor, np.ndarray))]
    return max((len(c) for c in columns if c.ndim == 1 and not c.is_floating_point()), default=0)


def _with_blocks(task: Task, tiny: Task, blocks: int) -> Task:
    """As many blocks as layouts need, if the task itself has them."""
    for name in LAYERS:
        if isinstance(has := getattr(task, name, None), int) and getattr(tiny, name) < min(has, blocks):
            more: dict[str, Any] = {name: min(has, blocks)}
            return dataclasses.replace(tiny, **more)
    return tiny


def _changes(task: Task, tiny: Task) -> list[str]:
    names = [f.name for f in dataclasses.fields(task) if f.init]
    pairs = [(name, getattr(task, name), getattr(tiny, name)) for name in names]
    return [f"{name} {before} -> {after}" for name, before, after in pairs if before != after]


def by_config(task: Task, model: nn.Module, config: Any, needs: Needs, vocabulary: int = VOCABULARY) -> Shrunk:
    """The same class of model from a smaller configuration, with so many words at most."""
    if not hasattr(config, "num_attention_heads"):
        return _state_space(task, model, config, needs, vocabulary)
    words = min(getattr(config, "vocab_size", vocabulary), vocabulary)
    tiny = smaller(config, needs.blocks, needs.heads, words)
    return _with_config(task, model, tiny, _chunks(tiny, SMALL_LENGTH // 2))


def _state_space(task: Task, model: nn.Module, config: Any, needs: Needs, vocabulary: int) -> Shrunk:
    """A model without attention: made anew from few settings, since others are derived from them."""
    known, expand = config.to_dict(), getattr(config, "expand", 2)
    sizes = {
        "num_hidden_layers": min(config.num_hidden_layers, needs.blocks),
        "hidden_size": 4 * HEAD_WIDTH, "num_heads": 4 * expand, "head_dim": HEAD_WIDTH, "expand": expand,
        "state_size": min(known.get("state_size", 16), 16), "n_groups": min(known.get("n_groups", 2), 2),
        "vocab_size": min(known.get("vocab_size", vocabulary), vocabulary), "pad_token_id": 0, "eos_token_id": 0,
        "bos_token_id": 0,
    }  # fmt: skip
    tiny = type(config)(**{name: value for name, value in sizes.items() if name in known})
    return _with_config(task, model, tiny, _chunks(tiny, SMALL_LENGTH // 2))


def _chunks(config: Any, length: int) -> dict[str, int]:
    """Chunks that sequences are padded to, longer than they are: work grows with them, and nothing else does."""
    held = getattr(config, "__dict__", {})
    sizes = {name: size for name, size in held.items() if name.endswith("chunk_size") and isinstance(size, int)}
    return {name: CHUNK for name, size in sizes.items() if size > max(CHUNK, length)}


def _with_config(task: Task, model: nn.Module, config: Any, changes: dict[str, int]) -> Shrunk:
    """The task with the same class of model from another configuration."""
    notes = [f"{name} {getattr(config, name)} -> {value}" for name, value in changes.items()]
    for name, value in changes.items():
        setattr(config, name, value)
    small = variant(task, FromConfig, model_kind=type(model), model_config=config)
    return Shrunk(small, notes, vocabulary=getattr(config, "vocab_size", None))
