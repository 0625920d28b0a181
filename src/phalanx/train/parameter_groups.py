"""What a task says of weights by name (`parameters`), where it takes effect: in an optimizer's groups, and in turns."""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn, optim

from phalanx import schedules
from phalanx.callbacks import Freeze
from phalanx.errors import WrongUse
from phalanx.parameters import PLAIN, WeightSettings, settings_of
from phalanx.task import Task


def split(optimizer: optim.Optimizer, task: Task) -> None:
    """Have each group of an optimizer's hold weights of the same settings alone, and go by these."""
    groups = []
    for group in optimizer.param_groups:
        parts: dict[WeightSettings, list[int]] = {}
        for place, weight in enumerate(group["params"]):
            parts.setdefault(settings_of(weight), []).append(place)
        groups += [group] if list(parts) in ([], [PLAIN]) else [_part(group, task, *each) for each in parts.items()]
    optimizer.param_groups = groups


def _part(group: Mapping[str, Any], task: Task, settings: WeightSettings, places: list[int]) -> dict[str, Any]:
    found = {**group, "lr": float(group["lr"]) * settings.factor, "factor": settings.factor}
    for key in ("params", "param_names"):
        if key in group:
            found[key] = [group[key][place] for place in places]
    if settings.weight_decay is not None:
        if "weight_decay" not in group:
            raise WrongUse(
                f"parameters set the weight_decay of {found['params'][0].logical_name}, and the optimizer of "
                f"{type(task).__name__} has none. Leave it out, or use another optimizer for that weight."
            )
        found["weight_decay"] = settings.weight_decay
    if settings.rate:
        found["rate"] = schedules.schedule(settings.rate, task.steps, task.warmup_steps, settings.first)
    return found


class LearningRates:
    """The learning rates of an optimizer's groups, set in every step as a schedule says."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._last: list[float] | None = None

    def set(self, schedule: Callable[[int], float], step: int, reduced: float = 1.0) -> float:
        """Set them for a step; returns the first group's, without a factor or schedule of its own.

        ``reduced``: what all are multiplied by beside their schedules. A rate that somebody else has set since the last
        step is refused: it would be lost here.
        """
        groups, factor = self.optimizer.param_groups, schedule(step)
        for group, was in zip(groups, self._last or [], strict=False):
            if group["lr"] != was:
                raise WrongUse(
                    f"the learning rate of a group was set to {group['lr']:g} by something else than the schedule, "
                    f"which had it at {was:g} and sets it in every step. Return a schedule() from the task, or give a "
                    "phalanx.ReduceLROnPlateau, or a callback of your own with rate_factor()."
                )
        for group in groups:
            group["lr"] = group["initial_lr"] * (group["rate"](step) if "rate" in group else factor) * reduced
        self._last = [group["lr"] for group in groups]
        return groups[0]["initial_lr"] / groups[0].get("factor", 1.0) * factor * reduced


class FrozenSteps(Freeze):
    """Weights that are not trained in the first steps of a run, as the task's parameters say."""


def frozen_first(weights: Mapping[str, nn.Parameter]) -> list[Freeze]:
    """One for each number of steps. ``weights``: all of the model's."""
    firsts: dict[int, list[str]] = {}
    for name, weight in weights.items():
        if first := settings_of(weight).first:
            firsts.setdefault(first, []).append(name)
    found: list[Freeze] = []
    for first, names in firsts.items():
        found.append(FrozenSteps([glob.escape(name) for name in names], until=first))
        found[-1].on_model(names)
    return found


@dataclass(frozen=True)
class Clipping:
    """By which norms a step's gradients are clipped: that of all, or of groups of weights each by its own."""

    limit: float
    """Of the norm of all weights that are in no group."""
    limits: Mapping[str, float]
    """By the pattern of a group."""
    patterns: Mapping[str, str]
    """Of weights that are in one, which; the same on all ranks."""
    groups: list[frozenset[str]]
    """Weights whose norms are needed beside that of all: of each group, then of all others; none without groups."""

    @classmethod
    def of(cls, task: Task, weights: Mapping[str, nn.Parameter]) -> Clipping:
        """``weights``: all of the model's, as they are on one device."""
        clips = {name: found for name, weight in weights.items() if (found := settings_of(weight)).clip is not None}
        limits = {found.clipped_with: float(found.clip or 0) for found in clips.values()}
        patterns = {name: found.clipped_with for name, found in clips.items()}
        members = [frozenset(name for name, own in patterns.items() if own == pattern) for pattern in limits]
        others = frozenset(weights.keys() - patterns.keys())
        return cls(task.clip, limits, patterns, [*members, others] if limits else [])

    def factors(self, norm: float, norms: list[float], divisor: float) -> tuple[float, dict[str, float]]:
        """What gradients are multiplied by: all but those in groups, and these by weight.

        ``norm``: of the mean gradient of all. ``norms``: those of `groups`, not divided yet by ``divisor``.
        """
        if not self.limits:
            return clipped(self.limit, norm), {}
        limits = [*self.limits.values(), self.limit]
        *own, rest = [clipped(limit, each / divisor) for limit, each in zip(limits, norms, strict=True)]
        by_pattern = dict(zip(self.limits, own, strict=True))
        return rest, {name: by_pattern[pattern] for name, pattern in self.patterns.items()}


def clipped(limit: float, norm: float) -> float:
    """The factor that makes a gradient of a norm no longer than the limit."""
    return min(1.0, limit / (norm + 1e-6))
