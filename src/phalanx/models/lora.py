"""LoRA: a model's linears stay as they are, and beside each a product of low rank is trained.

``weight @ x + scale * lora_B(lora_A(dropout(x)))``, with the names that peft gives them. ``rslora`` divides by the root
of the rank instead of the rank. ``dora`` also trains how long each row of the sum of both is; its gradient does not go
through the length that a row has by itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.anatomy import Anatomy
from phalanx.errors import WrongUse, closest
from phalanx.kernels.nf4 import BLOCK
from phalanx.models import nf4

LoraKind = Literal["lora", "dora", "rslora"]
A, B, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude_vector"
FOUR_BITS = ("weight_packed", "weight_absmax", "weight_scales")
"""What a weight in 4 bits consists of, in the order of `nf4.FourBits`."""


@dataclass(frozen=True)
class Lora:
    """What is put beside linears."""

    rank: int
    alpha: float
    kind: LoraKind = "lora"
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.kind == "rslora" else self.rank)


class LoraLinear(nn.Linear):
    """A frozen linear and its product of low rank."""

    low_rank = (A, B)
    """The two linears of that product; whoever cuts this one cuts them with it."""

    def __init__(self, base: nn.Linear, lora: Lora) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.lora, self.scale = lora, lora.scale
        self.weight, self.bias = base.weight, base.bias
        self.lora_A = nn.Linear(self.in_features, lora.rank, bias=False)
        self.lora_B = nn.Linear(lora.rank, self.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)
        self.lora_dropout = nn.Dropout(lora.dropout) if lora.dropout else nn.Identity()
        dora = lora.kind == "dora"
        self.lora_magnitude_vector = nn.Parameter(lengths(base.weight.detach())) if dora else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.product(x)
        return out if self.bias is None else out + self.bias

    def alone(self, x: Tensor) -> Tensor:
        """What its own weight makes of an input."""
        return F.linear(x, self.weight)

    def product(self, x: Tensor) -> Tensor:
        """Without the bias."""
        dropped = self.lora_dropout(x)
        base, added = self.alone(x), self.lora_B(self.lora_A(dropped)) * self.scale
        if self.lora_magnitude_vector is None:
            return base + added
        length = lengths(self.weight + self.scale * (self.lora_B.weight @ self.lora_A.weight)).detach()
        factor = self.lora_magnitude_vector / length
        seen = base if dropped is x else F.linear(dropped, self.weight)
        return base + (factor - 1) * seen + factor * added


def merged(weight: Tensor, a: Tensor, b: Tensor, magnitude: Tensor | None, scale: float) -> Tensor:
    """The weight of a plain linear that computes what it does together with its product of low rank."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    whole = weight.to(wide) + scale * (b.to(wide) @ a.to(wide))
    if magnitude is not None:
        whole = whole * (magnitude.to(wide) / lengths(whole)).unsqueeze(1)
    return whole.to(weight.dtype)


class FourBitLoraLinear(LoraLinear):
    """One whose own weight is kept in 4 bits."""

    def __init__(self, base: nn.Linear, lora: Lora) -> None:
        if lora.kind == "dora":
            raise WrongUse("lora_kind=dora needs whole weights, and four_bit keeps none. Use lora_kind=lora or rslora.")
        super().__init__(base, lora)
        self.part: nf4.Divided | None = None
        self.register_parameter("weight", None)
        for name, part in zip(FOUR_BITS, nf4.quantised(base.weight), strict=True):
            self.register_parameter(name, nn.Parameter(part, requires_grad=False))

    def alone(self, x: Tensor) -> Tensor:
        bits = nf4.FourBits(*(getattr(self, name) for name in FOUR_BITS))
        return nf4.product(x, bits, (self.out_features, self.in_features), self.part)

    @property
    def row_sizes(self) -> dict[str, int]:
        """How much a row has of what can be cut between rows; nothing where rows are not whole blocks."""
        columns = self.in_features
        return {} if columns % BLOCK else dict(zip(FOUR_BITS, (columns // 2, columns // BLOCK), strict=False))

    @property
    def stands_for(self) -> dict[str, int]:
        """How many numbers each of what it consists of stands for."""
        return dict.fromkeys(FOUR_BITS, 0) | {FOUR_BITS[0]: self.out_features * self.in_features}

    def divide(self, dim: int, spans: tuple[tuple[int, int], ...]) -> None:
        """From now on compute with these spans of the weight; where it is cut so, they are all that is here."""
        self.part = nf4.Divided(dim, spans, cut=dim == 0 and bool(self.row_sizes))


def is_four_bit(weight: str) -> bool:
    """Whether a weight of this name is a part of one in 4 bits."""
    return weight.rpartition(".")[2] in FOUR_BITS


def is_lora(weight: str) -> bool:
    """Whether a weight of this name is of a product of low rank, or of its magnitude."""
    return any(part in (A, B, MAGNITUDE) for part in weight.split(".")[-2:])


def lengths(weight: Tensor) -> Tensor:
    """Of each row."""
    return torch.linalg.vector_norm(weight, dim=1)


def attach(model: nn.Module, lora: Lora, targets: Sequence[str] = (), four_bit: bool = False) -> list[str]:
    """Freeze a model and put a product of low rank beside its linears; gives their names.

    ``targets``: the last parts of linears' names, or regular expressions for whole names; by default all of its blocks.
    ``four_bit``: what they stand beside is kept in 4 bits.
    """
    kind = FourBitLoraLinear if four_bit else LoraLinear
    found = chosen(model, targets)
    linears = (module for name, module in model.named_modules() if name in found and isinstance(module, nn.Linear))
    most = max(min(linear.in_features, linear.out_features) for linear in linears)
    if lora.rank > most:
        raise WrongUse(
            f"lora={lora.rank} is no low rank: the weights it would stand beside have ranks of {most} at most. Set "
            "lora to less, such as 16, or to 0 to train all weights."
        )
    for weight in model.parameters():
        weight.requires_grad_(False)
    for name in found:
        owner, _, last = name.rpartition(".")
        base = model.get_submodule(name)
        assert isinstance(base, nn.Linear)
        setattr(model.get_submodule(owner), last, kind(base, lora))
    return found


def chosen(model: nn.Module, targets: Sequence[str] = ()) -> list[str]:
    """The linears that targets mean."""
    blocks = Anatomy.of(model).blocks
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    inside = [name for name in linears if any(name.startswith(block + ".") for block in blocks)]
    if not targets:
        if not inside:
            raise WrongUse(f"{type(model).__name__} has no plain linears in its blocks to put LoRA beside. Set lora=0.")
        return inside
    matched = {target: [name for name in linears if _means(target, name)] for target in targets}
    for target, names in matched.items():
        if not names:
            raise WrongUse(
                f"lora_targets={target} matches no linear of {type(model).__name__}; "
                f"{closest(target, {name.rpartition('.')[2] for name in linears})}"
            )
    return [name for name in linears if any(name in names for names in matched.values())]


def _means(target: str, name: str) -> bool:
    if name == target or name.endswith("." + target):
        return True
    try:
        return re.fullmatch(target, name) is not None
    except re.error as error:
        raise WrongUse(f"lora_targets={target} is no regular expression ({error}). Mend it.") from None
