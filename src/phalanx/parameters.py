"""Training settings by the names of weights: `Task.parameters` and `Task.layer_decay`, noted on each weight of a model.

A model that is built by `building` has them on its weights, where optimizers, clipping and turns find them
(`settings_of`): they go wherever the weight goes, as a shard or as a stand-in.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from phalanx import schedules
from phalanx.anatomy import Anatomy
from phalanx.errors import WrongUse, closest

if TYPE_CHECKING:
    from phalanx.task import Task


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """What is other for some weights; what is None is as for all."""

    learning_rate_factor: float | None = None
    """Their learning rate is so many times the others'."""
    weight_decay: float | None = None
    rate: str | None = None
    """A schedule of their own (`schedules`), which begins with their first step."""
    clip: float | None = None
    """They are clipped by the norm of their own gradients, and are not in that of the others."""
    frozen: bool | None = None
    """Never trained: no gradient, no moments."""
    frozen_steps: int | None = None
    """Not trained in so many first steps of the run."""

    def check(self, pattern: str) -> None:
        """Refuse what cannot work."""
        where = f"parameters[{pattern!r}]"
        if self == ParameterGroup():
            names = ", ".join(field.name for field in fields(self))
            raise WrongUse(f"{where} says nothing about its weights. Give it one of: {names}.")
        if self.learning_rate_factor is not None and not 0 < self.learning_rate_factor < math.inf:
            raise WrongUse(
                f"{where}: learning_rate_factor={self.learning_rate_factor} is no factor. Set it above 0, or "
                "frozen=true for weights that are not to be trained."
            )
        if self.weight_decay is not None and not 0 <= self.weight_decay < math.inf:
            raise WrongUse(f"{where}: weight_decay={self.weight_decay} is no rate. Set it to a number from 0 up.")
        if self.clip is not None and not self.clip > 0:
            raise WrongUse(f"{where}: clip={self.clip} would stop all learning. Set it above 0, or to inf for none.")
        if self.frozen_steps is not None and self.frozen_steps < 0:
            raise WrongUse(f"{where}: frozen_steps={self.frozen_steps} is below 0. Set it to 0 or more.")
        if self.frozen and self.frozen_steps:
            raise WrongUse(f"{where} has frozen and frozen_steps. Give one of the two: for ever, or for so many steps.")
        if self.rate is not None:
            schedules.parsed(self.rate)


@dataclass(frozen=True)
class WeightSettings:
    """What follows for one weight."""

    factor: float = 1.0
    """On its learning rate."""
    weight_decay: float | None = None
    rate: str = ""
    first: int = 0
    """The first step that trains it."""
    clip: float | None = None
    clipped_with: str = ""
    """The pattern of those whose norm it is clipped by; empty: all that have none of their own."""
    in_block: bool = False
    """Whether it is one of the model's repeated blocks'."""


PLAIN = WeightSettings()


def settings_of(weight: Tensor) -> WeightSettings:
    """What was noted on a weight."""
    found: WeightSettings = getattr(weight, "weight_settings", PLAIN)
    return found


def are_set(task: Task) -> bool:
    """Whether a task says anything about weights by their names or places."""
    return bool(task.parameters) or task.layer_decay != 1 or task.optimizer_kind == "muon"


def check_parameters(task: Task) -> None:
    """Refuse settings that cannot work with any model."""
    if not 0 < task.layer_decay <= 1:
        raise WrongUse(f"layer_decay={task.layer_decay} is no decay. Set it above 0 and at most 1, such as 0.9.")
    if not isinstance(task.parameters, Mapping):
        raise WrongUse(
            f"parameters is a {type(task.parameters).__name__}. Write a dict from patterns of names to "
            'phalanx.ParameterGroup: {"embed.*": ParameterGroup(weight_decay=0.0)}'
        )
    for pattern, group in task.parameters.items():
        if not isinstance(group, ParameterGroup):
            raise WrongUse(
                f"parameters[{pattern!r}] is a {type(group).__name__}. Make it a phalanx.ParameterGroup, such as "
                "ParameterGroup(weight_decay=0.0)."
            )
        group.check(pattern)


def building(task: Task) -> Callable[[], nn.Module]:
    """What builds the task's model, with its settings noted on its weights and frozen ones without gradients."""
    if not are_set(task):
        return task.model

    @functools.wraps(task.model)
    def build() -> nn.Module:
        model = task.model()
        if isinstance(model, nn.Module):
            _note(task, model)
        return model

    return build


def _note(task: Task, model: nn.Module) -> None:
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    tied = {name: weight for name, weight in model.named_parameters(remove_duplicate=False) if name not in weights}
    names = {id(weight): name for name, weight in weights.items()}
    said = _said(task.parameters, list(weights), {n: names[id(w)] for n, w in tied.items() if id(w) in names})
    depths: dict[str, int] = {}
    anatomy = task.anatomy(model) if task.layer_decay != 1 or task.optimizer_kind == "muon" else None
    if task.layer_decay != 1 and anatomy is not None:
        if not anatomy.blocks:
            raise WrongUse(
                f"layer_decay={task.layer_decay} goes by a model's repeated blocks, and {type(task).__name__} has "
                "none that are known. Name them: anatomy(model) returns phalanx.Anatomy.of(model, blocks='layers.*')."
            )
        depths = from_the_end(anatomy)
    blocks = {name for unit in anatomy.units if unit.place == "block" for name in unit.weights} if anatomy else set()
    for name, weight in weights.items():
        own = said[name]
        if own.frozen and own.frozen_steps:
            raise WrongUse(
                f"parameters say of {name} that it is frozen, and that it is for {own.frozen_steps} steps. Leave one "
                "out: a later pattern with frozen=false undoes an earlier one."
            )
        if own.frozen:
            weight.requires_grad_(False)
            continue
        clipped_with = _last(task.parameters, name, "clip") if own.clip is not None else ""
        weight.weight_settings = WeightSettings(  # type: ignore[attr-defined]
            factor=(own.learning_rate_factor or 1.0) * task.layer_decay ** depths.get(name, 0),
            weight_decay=own.weight_decay, rate=own.rate or "", first=own.frozen_steps or 0, clip=own.clip,
            clipped_with=clipped_with, in_block=name in blocks,
        )  # fmt: skip


def _matches(pattern: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if fnmatchcase(name, pattern)]


def _last(groups: Mapping[str, ParameterGroup], name: str, setting: str) -> str:
    """The pattern that a weight has a setting from: the last one that says something of it."""
    said = [p for p, group in groups.items() if getattr(group, setting) is not None and fnmatchcase(name, p)]
    return said[-1] if said else ""


def _said(
    groups: Mapping[str, ParameterGroup], names: Sequence[str], tied: Mapping[str, str]
) -> dict[str, ParameterGroup]:
    """Of each weight what is said of it, later patterns before earlier ones; refused where one has no effect.

    ``tied``: second names of weights, each with the first.
    """
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    given: dict[str, dict[str, tuple[str, Any]]] = {name: {} for name in names}
    for pattern, group in groups.items():
        matched = _matches(pattern, names)
        if not matched and (second := _matches(pattern, list(tied))):
            raise WrongUse(
                f"parameters[{pattern!r}] matches {second[0]}, a second name of {tied[second[0]]}. Use that one: a "
                "weight has one set of settings."
            )
        if not matched:
            raise WrongUse(
                f"parameters[{pattern!r}] matches no weight that is trained (* is anything, as in 'encoder.*'); "
                f"{closest(pattern, names)}"
            )
        own = {setting: value for setting, value in asdict(group).items() if value is not None}
        for name in matched:
            found[name] |= own
            given[name] |= {setting: (pattern, value) for setting, value in own.items()}
    for pattern, group in groups.items():
        for setting, value in asdict(group).items():
            if value is not None and not any(one.get(setting) == (pattern, value) for one in given.values()):
                raise WrongUse(
                    f"parameters[{pattern!r}] has {setting}={value}, and later patterns say otherwise of all its "
                    "weights. Put it after them, or leave it out."
                )
    return {name: ParameterGroup(**own) for name, own in found.items()}


def from_the_end(anatomy: Anatomy) -> dict[str, int]:
    """Of each weight how many blocks come from its own to the end: 0 after the last, one more than all before them."""
    blocks = {name: number for number, name in enumerate(anatomy.blocks)}
    before = set(anatomy.before)

    def depth(module: str) -> int:
        if module in blocks:
            return len(blocks) - blocks[module]
        return len(blocks) + 1 if module in before or not module else 0

    return {name: max(map(depth, unit.modules)) for unit in anatomy.units for name in unit.weights}


def fitted(task: Task, names: Sequence[str]) -> tuple[Task, list[str]]:
    """A task whose model was made smaller, without settings of weights that it has no more; and what was left out.

    ``names``: the weights that the smaller model trains.
    """
    groups: dict[str, ParameterGroup] = {}
    notes = []
    for pattern, group in task.parameters.items():
        matched = _matches(pattern, names)
        said = [setting for setting, value in asdict(group).items() if value is not None]
        idle = [s for s in said if not any(_last(task.parameters, name, s) == pattern for name in matched)]
        if not matched:
            notes.append(f"parameters {pattern!r} left out: the smaller model has no such weight")
        elif idle:
            which = ", ".join(idle)
            notes.append(f"parameters {pattern!r}: {which} left out: others say it of all such weights that are left")
        if len(idle) < len(said):
            groups[pattern] = replace(group, **dict.fromkeys(idle))
    if not notes:
        return task, []
    found = copy.copy(task)
    object.__setattr__(found, "parameters", groups)
    return found, notes
