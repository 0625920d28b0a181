"""``comm=onebit``'s word to the optimizer: from some step on Adam's variance stays, and momentum is what ranks send.

Until then all is as without it. Then the variance, corrected for its beginning, is frozen, and none of a weight's is
less than some of their mean: an element that had next to no gradient so far would be moved without bound. What ranks
have summed is the new momentum (`parallel.weights.momentum`), whose norm is the one that is told and clipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim

from phalanx.adamw import AdamW
from phalanx.comm import Comm
from phalanx.errors import WrongUse
from phalanx.parallel.spread import Spread
from phalanx.parallel.weights.momentum import Momentum
from phalanx.parallel.weights.weight import Weight
from phalanx.train.optimizers import Several, parts_of

FLOOR = 0.05
"""Of the mean of a weight's variance."""
ADAM = (optim.Adam, optim.AdamW, AdamW)
REFUSED = {"amsgrad": False, "maximize": False, "differentiable": False, "capturable": False}


class FrozenVariance:
    """Of one optimizer. In its groups ``frozen`` says after how many steps, and ``terms`` how many the last had."""

    @classmethod
    def of(cls, optimizer: optim.Optimizer, spread: Spread, steps: int) -> FrozenVariance | None:
        """None where the layout asks for nothing of the kind."""
        method = Comm.parse(spread.layout.comm)
        if method is None or method.name != "onebit" or not spread.layout.coded_axis:
            return None
        return cls(optimizer, spread, method.exact_steps(steps))

    def __init__(self, optimizer: optim.Optimizer, spread: Spread, begins: int) -> None:
        self.optimizer, self.spread, self.begins = optimizer, spread, begins
        self.momentum, self.step = Momentum(), 0
        for part in parts_of(optimizer):
            self._check(part)
        for bucket in spread.buckets:
            if bucket.coded is not None:
                bucket.coded.momentum = self.momentum

    def _check(self, optimizer: optim.Optimizer) -> None:
        comm, name = self.spread.layout.comm, type(optimizer).__name__
        if type(optimizer) not in ADAM:
            raise WrongUse(
                f"comm={comm} sends the momentum of Adam, and the optimizer is {name}. Use torch's Adam or AdamW or "
                "phalanx.optim.AdamW, or comm=int4."
            )
        for group in optimizer.param_groups:
            for option, plain in REFUSED.items():
                if group.get(option, plain) != plain:
                    raise WrongUse(
                        f"comm={comm} is not offered with {option} of {name}. Leave it out, or use comm=int4."
                    )
            if group.get("moments", "float32") != "float32":
                raise WrongUse(
                    f"comm={comm} sends momentum as it is kept, and moments={group['moments']} would round it again. "
                    "Use moments=float32, or comm=int4."
                )
            if group["weight_decay"] and not _decoupled(optimizer, group):
                raise WrongUse(
                    f"comm={comm} sends the momentum of gradients alone, and {name} adds weight_decay="
                    f"{group['weight_decay']} to them. Use AdamW, or comm=int4."
                )

    @property
    def frozen(self) -> bool:
        return any("frozen" in group for group in self.optimizer.param_groups)

    def begin(self, step: int, scale: float) -> None:
        """Before a step's first backward; ``scale``: of its loss."""
        self.step = step
        known = "terms" in self.optimizer.param_groups[0]
        if step >= self.begins and not self.frozen and known:  # a step that counts comes first, exactly summed
            self._freeze(step)
        self.spread.reduction.encode(self.frozen)
        if self.frozen:
            self.momentum.divisor = scale * self.optimizer.param_groups[0]["terms"]
            self.momentum.of = {
                weight.name: (self.optimizer.state[weight.shard]["exp_avg"], group["betas"][0])
                for weight, group in self._each()
                if self.optimizer.state.get(weight.shard)
            }

    @torch.no_grad()
    def _freeze(self, step: int) -> None:
        """All ranks must call it: what is least follows from whole weights.

        A step begins with it, when a copy of the state may be under way: so what it copies is left as it is.
        """
        means = self._means()
        for weight, group in self._each():
            state, stays = self.optimizer.state.get(weight.shard), group["betas"][1]
            if not state:
                continue  # it had no gradient on any rank; if it ever has, that is said
            corrected = 1 - stays ** int(state["step"])
            frozen = state["exp_avg_sq"] / corrected
            state["exp_avg_sq"] = frozen.clamp_(min=FLOOR * means[weight.name] / corrected).mul_(1 - stays**step)
        for group in self.optimizer.param_groups:
            group["frozen"] = step

    def _means(self) -> dict[str, float]:
        """Of each weight's variance, all of it."""
        holding, mesh = self.spread.holding, self.spread.mesh
        names = [name for name, trained in self.spread.trainable.items() if trained]
        sums = torch.zeros(2, len(names), dtype=torch.float64, device=self.spread.device)
        for number, name in enumerate(names):
            weight = self.spread.weights.get(name)
            state = self.optimizer.state.get(weight.shard) if weight is not None else None
            if state and holding.counts(name):
                sums[0, number], sums[1, number] = state["exp_avg_sq"].double().sum() / mesh.size("dp"), 1.0
        mesh.world.all_reduce(sums).wait()
        found = dict(zip(names, sums.T.tolist(), strict=True))
        for name, (total, held) in found.items():
            if held and not total > 0:
                raise self._unknown(name)
        return {name: total / max(1, holding.shapes[name].numel()) for name, (total, _) in found.items()}

    def _unknown(self, name: str) -> WrongUse:
        return WrongUse(
            f"comm={self.spread.layout.comm} freezes the variance of gradients after {self.begins} steps, in which "
            f"{name} had none. Let more of them be exact, as with comm=onebit:40, freeze the weight, or use comm=int4."
        )

    def complete(self) -> None:
        """When all sums are there: those that were sent as they are become momentum too."""
        others = {w.name for b in self.spread.buckets if b.coded is not None for w in b.coded.others}
        gradients = [(weight, own) for weight, own in self.spread.gradients.each() if weight.name in others]
        self.momentum.add(gradients, 1.0)
        self.momentum.become(gradients)

    @torch.no_grad()
    def update(self, factor: float, without: set[str], apart: Mapping[str, float], divisor: float) -> None:
        """``factor``: of what was summed, for momentum to be it; ``divisor``: by which that divides sums."""
        self.spread.gradients.give(factor, without, apart)
        missed = 1 - self.momentum.divisor / divisor
        clips = {name: own * divisor for name, own in apart.items()}
        for part in parts_of(self.optimizer):
            if "step" in vars(part):
                raise WrongUse(
                    f"comm={self.spread.layout.comm} updates in the place of {type(part).__name__}.step, for which "
                    "somebody has put another. Leave it as it is, or use comm=int4."
                )
        own = {weight.shard: clips.get(weight.name, factor * divisor) * missed for weight, _ in self._each()}
        step = optim.Optimizer.profile_hook_step(partial(self._step, own))  # who has hooks on a step is told
        if isinstance(self.optimizer, Several):
            every = optim.Optimizer.profile_hook_step(lambda several: [step(part) for part in parts_of(several)])
            every(self.optimizer)
        else:
            step(self.optimizer)
        self.spread.updated()

    def _step(self, missed: Mapping[nn.Parameter, float], optimizer: optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group, missed[weight])

    def _update(self, weight: Tensor, group: dict[str, Any], missed: float) -> None:
        """``missed``: how much of the old momentum is still to be put to the new one, by what stays of it."""
        state, (first, second) = self.optimizer.state.get(weight), group["betas"]
        assert weight.grad is not None
        if not state:
            raise self._unknown(weight.logical_name)  # type: ignore[attr-defined]
        state["step"] += 1
        momentum, rate = state["exp_avg"], float(group["lr"])
        momentum.mul_(first * missed).add_(weight.grad)
        size = (state["exp_avg_sq"] / (1 - second ** group["frozen"])).sqrt_().add_(group["eps"])
        weight.mul_(1 - rate * group["weight_decay"])
        weight.addcdiv_(momentum, size, value=-rate / (1 - first ** (self.step + 1)))

    def counted(self, terms: float) -> None:
        """A step that counts had so many terms."""
        for group in self.optimizer.param_groups:
            group["terms"] = terms

    def _each(self) -> list[tuple[Weight, dict[str, Any]]]:
        groups = {shard: group for group in self.optimizer.param_groups for shard in group["params"]}
        weights = [weight for weight in self.spread.weights.values() if weight.trainable]
        return [(weight, groups[weight.shard]) for weight in weights if weight.shard in groups]


def _decoupled(optimizer: optim.Optimizer, group: dict[str, Any]) -> bool:
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, (optim.AdamW, AdamW))))
