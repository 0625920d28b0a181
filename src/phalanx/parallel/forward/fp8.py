"""Linears that compute in 8 bits: a layer around each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.kernels import fp8
from phalanx.logits import Logits
from phalanx.parallel.forward.wrapper import Forward, Layer, wrapper


@dataclass
class Switch:
    """Whether products are in 8 bits just now: not where a block is held against one that has none."""

    on: bool = True


class Fp8Linear(Layer):
    """In the place of a linear's own forward. A rank's part of a weight may be too uneven for 8 bits."""

    title = "fp8"

    def __init__(self, module: nn.Linear, maxima: Tensor | None, switch: Switch) -> None:
        """``maxima``: a leaf with what was largest in the step before; None: every row has a scale of its own."""
        self.module, self.maxima, self.switch = module, maxima, switch
        self.of_x = maxima
        """The leaf whose first number is the largest of its input: its own, or that of a linear with the same input."""
        self.known = False
        """Whether there was a step before."""

    def __call__(self, rest: Forward, x: Tensor) -> Tensor:
        if not self._fits(x):
            return rest(x)
        out = self.product(x)
        return out if self.module.bias is None else out + self.module.bias

    def _fits(self, x: Tensor) -> bool:
        return self.switch.on and x.numel() > 0 and fp8.fits(*self.module.weight.shape)

    def product(self, x: Tensor) -> Tensor:
        """Without the bias."""
        weight = self.module.weight
        if not self._fits(x):
            return F.linear(x, weight)
        if self.maxima is None or self.of_x is None:
            return fp8.rowwise(x, weight)
        # nothing else to be differentiated: maxima alone must not make a graph
        maxima = self.maxima if x.requires_grad or weight.requires_grad else self.maxima.detach()
        return fp8.tensorwise(x, weight, maxima, self.of_x.detach()[0], self.known)


def narrow_logits(rest: Forward, *args: Any, **kwargs: Any) -> Any:
    """Around a head: the gradients of its lazy logits are products in 8 bits; logits themselves are what they were."""
    found = rest(*args, **kwargs)
    if isinstance(found, Logits):
        found.narrow = True
    return found


def product(module: Any, x: Tensor) -> Tensor:
    """What a linear, or Hugging Face's Conv1D, makes of its input before its bias is added."""
    if hasattr(module, "low_rank"):
        return module.product(x)
    if not isinstance(module, nn.Linear):
        return x @ module.weight
    around = wrapper(module)
    narrow = [layer for layer in around.layers if isinstance(layer, Fp8Linear)] if around is not None else []
    return narrow[0].product(x) if narrow else F.linear(x, module.weight)


def is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it is a linear that does what torch's does, with a weight of its own."""
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward or "forward" in vars(module):
        return False
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    return weight is not None and weight.is_floating_point()
