"""Hostile tasks that say much of weights by their names, and the same said once more for a loop by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn, optim

from phalanx import Layout, ParameterGroup, Task
from tests.layouts import task_for
from tests.parity import HostileLanguage, Mixture

STEPS, WARMUP, RATE, DECAY, LAYER_DECAY, CLIP = 4, 2, 1e-2, 0.1, 0.7, 0.05


def said() -> dict[str, ParameterGroup]:
    return {
        "blocks.*": ParameterGroup(learning_rate_factor=0.5, weight_decay=0.3, clip=0.02),
        "blocks.1.*": ParameterGroup(clip=0.03, frozen_steps=2, rate="linear:end=0.2"),
        "*norm.weight": ParameterGroup(weight_decay=0.0, clip=math.inf),
        "blocks.0.attention.*": ParameterGroup(frozen=True),
        "blocks.0.attention.k_proj.weight": ParameterGroup(frozen=False, learning_rate_factor=2.0),
        "scalar": ParameterGroup(rate="constant", frozen_steps=1),
    }


class InWords:
    """The settings of `said`, weight by weight."""

    def __init__(self, task: Task, blocks: int) -> None:
        self.muon, self.blocks, self.learning_rate = task.optimizer_kind == "muon", blocks, task.learning_rate

    def is_frozen(self, name: str) -> bool:
        return name.startswith("blocks.0.attention.") and name != "blocks.0.attention.k_proj.weight"

    def trains(self, step: int, name: str) -> bool:
        first = 2 if name.startswith("blocks.1.") else 1 if name == "scalar" else 0
        return step >= first

    def optimizers(self, weights: list[nn.Parameter]) -> Mapping[str, optim.Optimizer]:
        own: dict[str, list[dict[str, Any]]] = {"muon": [], "adamw": []}
        for weight in weights:
            name = weight.logical_name
            inside = name.startswith("blocks.")
            decay = 0.0 if name.endswith("norm.weight") else 0.3 if inside else DECAY if weight.ndim > 1 else 0.0
            rate = self.learning_rate * (
                2.0 if name.endswith("blocks.0.attention.k_proj.weight") else 0.5 if inside else 1
            )
            depth = 0
            if inside:
                depth = self.blocks - int(name.split(".")[1])
            elif name != "norm.weight" and not name.startswith("head"):
                depth = self.blocks + 1
            hidden = self.muon and inside and weight.ndim == 2
            rate *= LAYER_DECAY**depth
            own["muon" if hidden else "adamw"].append({"params": [weight], "lr": rate, "weight_decay": decay})
        made: dict[str, optim.Optimizer] = {"adamw": torch.optim.AdamW(own["adamw"])}
        if own["muon"]:
            made["muon"] = torch.optim.Muon(own["muon"], adjust_lr_fn="match_rms_adamw")
        return made

    def clipped_together(self, names: list[str]) -> list[tuple[float, list[str]]]:
        norms = [name for name in names if name.endswith("norm.weight")]
        second = [name for name in names if name.startswith("blocks.1.") and name not in norms]
        blocks = [name for name in names if name.startswith("blocks.") and name not in (*norms, *second)]
        rest = [name for name in names if name not in (*norms, *second, *blocks)]
        return [(0.03, second), (0.02, blocks), (CLIP, rest)]

    def factor(self, step: int, name: str) -> float:
        if name == "scalar":
            return 0.0 if step < 1 else min(1.0, step / WARMUP)
        if name.startswith("blocks.1."):
            return {0: 0.0, 1: 0.0, 2: 0.5, 3: 1.0}[step]
        return {0: 0.5, 1: 1.0, 2: 1.0, 3: 0.1 + 0.45 * (1 + math.cos(math.pi / 2))}[step]


@dataclass
class NamedLanguage(HostileLanguage):
    steps: int = STEPS
    warmup_steps: int = WARMUP
    learning_rate: float = RATE
    weight_decay: float = DECAY
    layer_decay: float = LAYER_DECAY
    clip: float = CLIP
    parameters: dict[str, ParameterGroup] = field(default_factory=said)


@dataclass
class NamedMixture(Mixture):
    steps: int = STEPS
    warmup_steps: int = WARMUP
    learning_rate: float = RATE
    weight_decay: float = DECAY
    layer_decay: float = LAYER_DECAY
    clip: float = CLIP
    parameters: dict[str, ParameterGroup] = field(default_factory=said)


def named_task(layout: Layout, **settings: Any) -> Task:
    """The hostile task of a layout, with `said` of its weights."""
    plain = task_for(layout)
    shape = {
        each.name: getattr(plain, each.name) for each in fields(plain) if each.name in ("layers", "heads", "kv_heads")
    }
    return (NamedMixture if isinstance(plain, Mixture) else NamedLanguage)(**{**shape, **settings})
