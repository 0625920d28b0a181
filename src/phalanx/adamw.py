"""AdamW whose moments are kept in fewer bits: in bfloat16, or in 8 bits a number.

An update is computed wide; then moments are rounded up or down at random, so that small changes, which a narrow number
cannot hold, are kept on average. The draw of an element is keyed by the seed, the weight's name, its update's number
and the element's place in the whole weight: however a weight is cut, the same bits are kept of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn, optim

from phalanx import counter
from phalanx.errors import WrongUse
from phalanx.kernels.adamw import Hyperparameters, OnePass, Segment, Updated
from phalanx.kernels.choice import Kernel
from phalanx.kernels.moments import DTYPES, Moments, narrowed, widened

KEPT = ("exp_avg", "exp_avg_sq")


class AdamW(optim.Optimizer):
    """Adam with decoupled weight decay; ``moments``: how both of them are kept; ``seed``: of their rounding."""

    elementwise = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        moments: Moments = "bfloat16",
        seed: int = 0,
    ) -> None:
        if eps < 0 or not all(0 <= beta < 1 for beta in betas):
            raise WrongUse(f"eps={eps}, betas={betas}: AdamW needs eps from 0 on, and betas in [0, 1).")
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options | {"moments": moments, "seed": seed})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        moments = param_group.get("moments", self.defaults["moments"])
        if moments not in get_args(Moments):
            raise WrongUse(f"moments={moments!r} is not known. Choose one of: {', '.join(get_args(Moments))}.")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch has it, which would make numbers as wide as weights of narrow ones, and of codes."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for number, weight in zip(numbers, weights, strict=True):
            kept = state_dict["state"].get(number, {})
            self.state[weight] |= {key: kept[key].to(weight.device, copy=True) for key in KEPT if key in kept}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for number, group in enumerate(self.param_groups):
            for place, weight in enumerate(group["params"]):
                if weight.grad is not None:
                    self._update(weight, group, key(group, weight, f"{number} {place}"))

    def _update(self, weight: nn.Parameter, group: dict[str, Any], own: int) -> None:
        state = self.state[weight]
        dtype = weight.dtype if group["moments"] == "float32" else DTYPES[group["moments"]]
        if not state:
            state["step"] = torch.zeros(())
            state |= {key: torch.zeros_like(weight, dtype=dtype) for key in KEPT}
        state["step"] += 1
        number = int(state["step"])
        before = [state[key] for key in KEPT]
        if before[0].dtype != dtype:  # it goes on from what was kept in another way
            state |= {key: torch.zeros_like(weight, dtype=dtype) for key in KEPT}
        drawn = counter.nth(own, number)
        tensors = weight, weight.grad, *before, *(state[key] for key in KEPT)
        for parts, place in _parts(weight, tensors):
            _advance(parts, group, number, drawn, place)


def key(group: Mapping[str, Any], weight: nn.Parameter, unnamed: str = "") -> int:
    """What the draws of a weight are keyed by, in all of its updates."""
    return counter.key(group["seed"], "moments", getattr(weight, "logical_name", unnamed))


def _advance(parts: Sequence[Tensor], group: dict[str, Any], number: int, drawn: int, place: counter.Place) -> None:
    """Update a part of a weight, given its gradient, moments, and where new ones are kept."""
    weight, gradient, first, second, new_first, new_second = parts
    betas, rate = group["betas"], group["lr"]
    m, v = widened(first, second, weight.dtype)
    m.lerp_(gradient, 1 - betas[0])
    v.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    scale = v.sqrt().div_(math.sqrt(1 - betas[1] ** number)).add_(group["eps"])
    weight.mul_(1 - rate * group["weight_decay"]).addcdiv_(m, scale, value=-rate / (1 - betas[0] ** number))
    if group["moments"] != "float32":
        m, v = narrowed(m, v, group["moments"], counter.box_words(drawn, weight.shape, place, weight.device))
    new_first.copy_(m)
    new_second.copy_(v)


def _parts(weight: nn.Parameter, tensors: tuple[Any, ...]) -> Iterator[tuple[list[Tensor], counter.Place]]:
    """Tensors of the weight's shape in parts that are computed at a time, and where each lies in the whole weight."""
    most = counter.CHUNK.get(weight.device.type, counter.LARGE_CHUNK)
    for views, (offsets, whole) in _boxes(weight, tensors):
        if views[0].numel() <= most:
            yield views, (offsets, whole)
            continue
        rows = max(1, most // views[0][0].numel())
        for start, parts in enumerate(zip(*(view.split(rows) for view in views), strict=True)):
            yield list(parts), ((offsets[0] + start * rows, *offsets[1:]), whole)


def _boxes(weight: nn.Parameter, tensors: tuple[Any, ...]) -> Iterator[tuple[list[Tensor], counter.Place]]:
    """Where a rank has a shard of the weight, it says which boxes of the whole that is."""
    boxes = getattr(weight, "logical_boxes", None)
    if boxes is None:
        yield list(tensors), ((0,) * weight.ndim, weight.shape)
        return
    for place in boxes:
        yield [place.view(tensor) for tensor in tensors], (place.box.offsets, weight.logical_shape)  # type: ignore[attr-defined]


def _trial(device: torch.device) -> bool:
    """Two updates by the kernel, and by the optimizer itself."""
    kinds: tuple[Moments, ...] = "bfloat16", "float8"
    for moments in kinds:
        weight = nn.Parameter(torch.linspace(-3, 3, 4000, device=device))
        own, kept = weight.detach().clone(), torch.zeros(2, 4000, dtype=DTYPES[moments], device=device)
        twin = AdamW([weight], lr=0.1, moments=moments)
        for number in (1, 2):
            weight.grad = weight.detach() / 2**number
            drawn = key(twin.defaults, weight, "0 0"), (Segment(0, 4000),)
            updated = Updated(own, weight.grad, kept[0], kept[1], None, *drawn)
            OnePass().prepared([updated])(Hyperparameters(number, 0.1, (0.9, 0.999), 1e-8, 0.01, decoupled=True), 1.0)
            twin.step()
        pairs = zip(kept, (twin.state[weight][name] for name in KEPT), strict=True)
        same = [float((mine == theirs).float().mean()) for mine, theirs in pairs]
        if not torch.allclose(own, weight, rtol=1e-3) or min(same) < 0.99:  # few are rounded to the other side
            return False
    return True


KERNEL = Kernel("AdamW's update with narrow moments", _trial)
