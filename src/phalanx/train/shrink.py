"""A large task made small enough to prove on a laptop, its structure kept: fewer blocks, narrower, shorter."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phalanx import configs
from phalanx.data.adopted import adopted
from phalanx.errors import CannotHere, WrongUse
from phalanx.layout import Layout
from phalanx.models.smaller import folded, made_smaller, shorter_chunks, special_tokens, ways
from phalanx.parallel.weights.blueprint import Blueprint
from phalanx.parameters import fitted
from phalanx.task import Task
from phalanx.train.variant import Variant, variant

SMALL_WEIGHTS, MOST_WEIGHTS, SMALL_LENGTH, SHORTEST = 300_000, 3_000_000, 32, 6
VOCABULARY = 131
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
    special: dict[int, int] = field(default_factory=dict)
    """Tokens that mean something to the model, each with what it is in the smaller one; data keeps them in their
    places."""
    by_config: bool = False
    """Whether its configuration was made smaller, by rules that need not fit it."""


def shrunk(task: Task, needs: Needs) -> Shrunk:
    """The task itself if it is small; otherwise as its `tiny` makes it, or its Hugging Face configuration."""
    return next(shrunk_ways(task, needs))


def shrunk_ways(task: Task, needs: Needs) -> Iterator[Shrunk]:
    """The task made small, one way after another: where a configuration is made smaller, the first may not work."""
    model = Blueprint(task.model, task.seed).model
    weights, length = _weights(model), _length(task)
    looked_up = any(isinstance(module, nn.Embedding) for module in model.modules())
    config = getattr(model, "config", None)
    special = {token: token for own in configs_in(model) for token in special_tokens(own)}
    if weights <= SMALL_WEIGHTS and (length <= SMALL_LENGTH or not looked_up):
        own = copy.deepcopy(config)
        notes = shorter_chunks(own, length) if configs.is_config(own) else []
        small = _with_config(task, model, own, notes, special) if notes else Shrunk(task, special=special)
        yield replace(small, by_config=False)
        return
    shorter = SMALL_LENGTH // 2 if length > SMALL_LENGTH and looked_up else None
    if callable(own := type(task).tiny) and own is not Task.tiny:
        yield _told(task, Shrunk(_with_blocks(task, task.tiny(), needs.blocks), special=special), weights, length)
    elif configs.is_config(config):
        for found in by_config(task, model, config, needs):
            for cut in dict.fromkeys([shorter, None]):
                yield _told(task, replace(found, length=cut), weights, length)
    else:
        yield _told(task, Shrunk(task, length=shorter, special=special), weights, length)


def _told(task: Task, found: Shrunk, weights: int, length: int) -> Shrunk:
    """With what was changed, in words; one that is too large still is refused."""
    now = Blueprint(found.task.model, task.seed).model
    if _weights(now) > MOST_WEIGHTS:
        raise WrongUse(
            f"{type(task).__name__} has {_weights(now):,} weights, too many to prove it on one machine in float64, and "
            "it is not known how to make it smaller. Give the task a tiny(): a copy of itself with the same structure "
            "and small sizes, e.g. return dataclasses.replace(self, width=32, layers=2)."
        )
    changed = _changes(task, found.task)
    found.task, lost = fitted(found.task, [name for name, each in now.named_parameters() if each.requires_grad])
    changed += lost
    if weights != _weights(now):
        changed.append(f"weights {weights:,} -> {_weights(now):,}")
    if found.length:
        changed.append(f"length {length} -> {found.length}")
    if found.vocabulary:
        changed.append(f"ids folded into {found.vocabulary}")
    found.notes = [*changed, *found.notes]
    return found


def configs_in(model: nn.Module) -> list[Any]:
    """The configurations of a model and of models inside it, once each."""
    found = {id(own): own for module in model.modules() if configs.is_config(own := getattr(module, "config", None))}
    return list(found.values())


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


def by_config(
    task: Task, model: nn.Module, config: Any, needs: Needs, vocabulary: int = VOCABULARY
) -> Iterator[Shrunk]:  # fmt: skip
    """The same class of model from smaller configurations, with so many words at most; those that can be built."""
    words = min(configs.vocabulary(config) or vocabulary, vocabulary)
    failed: Exception | None = None
    works = False
    for sizes in ways(config, needs.blocks, needs.heads, words):
        try:
            tiny = made_smaller(config, sizes)
            notes = shorter_chunks(tiny, SMALL_LENGTH // 2)
            found = _with_config(task, model, tiny, notes, folded(special_tokens(config), words))
            if _weights(Blueprint(found.task.model, task.seed).model) > MOST_WEIGHTS:
                raise ValueError("too many weights are left")
        except Exception as error:  # of the configuration's class, or of the model's: sizes that do not fit each other
            failed = failed or error
            continue
        works = True
        yield found
    if not works:
        assert failed is not None
        raise not_made_smaller(task, failed)


def not_made_smaller(task: Task, error: Exception) -> CannotHere:
    """What to say of a configuration that our rules do not fit: the task is not to blame."""
    told = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return CannotHere(
        f"{type(task).__name__} is too large to be tried as it is, and Phalanx could not make its model's "
        f"configuration smaller: what its rules make of it fails ({told}). The task itself may be right. Give it a "
        "tiny(): a copy of itself whose model() has small sizes of your own."
    )


def _with_config(
    task: Task, model: nn.Module, config: Any, notes: list[str], special: dict[int, int]
) -> Shrunk:  # fmt: skip
    """The task with the same class of model from another configuration."""
    small = variant(task, FromConfig, model_kind=type(model), model_config=config)
    return Shrunk(small, notes, vocabulary=configs.vocabulary(config), special=special, by_config=True)
