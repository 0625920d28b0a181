"""``comm=onebit`` on one device: Adam until some step, then momentum by its signs, and a variance that stays.

A sender has its own gradients and its share of what momentum was; signs of both, with what it owes, are summed, and of
the sums the signs are what all go on with.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn, optim

from phalanx.prove.reference.coded import Clip, Coded, State

FLOOR = 0.05


class OneBit(Coded):
    """The sums of a layout, and Adam's update by them."""

    frozen = False

    def begin(self, step: int, optimizer: optim.Optimizer, trained: dict[str, nn.Parameter]) -> None:
        self.step, self.groups = step, {p: group for group in optimizer.param_groups for p in group["params"]}
        self.kept = {name: optimizer.state[p] for name, p in trained.items() if p in optimizer.state}
        self.betas = {name: self.groups[trained[name]]["betas"] for name in self.kept}
        if self.frozen or step < self.begins:
            return
        self.frozen = True
        for name, state in self.kept.items():
            second = self.betas[name][1]
            variance = state["exp_avg_sq"] / (1 - second ** float(state["step"]))
            state["exp_avg_sq"] = torch.maximum(variance, FLOOR * variance.mean()) * (1 - second**step)
        for group in optimizer.param_groups:
            group["frozen"] = step

    def sum(self, gradients: list[State]) -> State:
        if not self.frozen:
            return {name: torch.stack([own[name] for own in gradients]).sum(0) for name in gradients[0]}
        return {name: self._momentum(name, [own[name] for own in gradients]) for name in gradients[0]}

    def _momentum(self, name: str, gradients: list[Tensor]) -> Tensor:
        """In units of sums: divided by the count it is what momentum becomes."""
        if name not in self.kept:
            return self.sum_of(name, gradients)
        first, senders = self.betas[name][0], len(gradients)
        known = first / (1 - first) * self.terms * self.kept[name]["exp_avg"]
        return (1 - first) * self.sum_of(name, [own + known / senders for own in gradients])

    def update(self, optimizer: optim.Optimizer, trained: dict[str, nn.Parameter], clip: Clip, count: float) -> None:
        for group in optimizer.param_groups:
            group["terms"] = count
        if not self.frozen:
            optimizer.step()
            self.terms = count
            return
        for name, weight in trained.items():
            if weight.grad is not None and name in self.kept:
                self._update(weight, self.kept[name], weight.grad, clip[name] * (1 - self.terms / count))
        self.terms = count

    def _update(self, weight: nn.Parameter, state: State, momentum: Tensor, missed: float) -> None:
        group = self.groups[weight]
        first, second = group["betas"]
        state["step"] += 1
        state["exp_avg"] = momentum + missed * first * state["exp_avg"]
        variance = state["exp_avg_sq"] / (1 - second ** group["frozen"])
        mean = state["exp_avg"] / (1 - first ** (self.step + 1))
        weight.data -= group["lr"] * (group["weight_decay"] * weight.data + mean / (variance.sqrt() + group["eps"]))
