"""Hostile tasks whose optimizers update whole matrices."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn, optim

import phalanx
from phalanx import Layout, Task
from tests.layouts import task_for
from tests.parity import HostileLanguage, Mixture

KINDS = ("muon", "adafactor", "soap", "own")


class Largest(optim.Optimizer):
    """A user's own: each column steps by its gradient over the largest of the matrix, and momentum is kept for it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["calls"] += 1
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.state[weight]
                    columns = torch.atleast_2d(weight.grad).flatten(1).norm(dim=0)
                    state["times"] = state.get("times", 0) + 1
                    state["columns"] = state.get("columns", torch.zeros_like(columns)).lerp(columns, 0.3)
                    scale = state["columns"].norm() * weight.norm().clamp(min=1) + 1e-3
                    weight.sub_(group["lr"] * weight.grad / scale)


def made(kind: str, params: list[nn.Parameter], rate: float) -> Any:
    if kind == "muon":  # by shape, as one would on one device
        hidden = [p for p in params if p.ndim == 2 and p.shape[0] != 37]
        chosen = {id(p) for p in hidden}
        rest = [p for p in params if id(p) not in chosen]
        return {"matrices": optim.Muon(hidden, lr=rate), "rest": optim.AdamW(rest, lr=rate)}
    if kind == "adafactor":
        return optim.Adafactor(params, lr=rate)
    if kind == "soap":
        return phalanx.optim.SOAP(params, lr=rate, every=2, largest=36)
    return Largest(params, lr=rate)


@dataclass
class WholeLanguage(HostileLanguage):
    kind: str = "muon"

    def optimizer(self, params: Any) -> Any:
        return made(self.kind, list(params), self.learning_rate)


@dataclass
class WholeMixture(Mixture):
    kind: str = "muon"

    def optimizer(self, params: Any) -> Any:
        return made(self.kind, list(params), self.learning_rate)


def whole_task(kind: str, layout: Layout, **settings: Any) -> Task:
    """The hostile task of a layout, with one of these optimizers."""
    plain = task_for(layout)
    own = {field.name: getattr(plain, field.name) for field in fields(plain)}
    return (WholeMixture if isinstance(plain, Mixture) else WholeLanguage)(**{**own, "kind": kind, **settings})
