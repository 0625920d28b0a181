"""LoRA of a run taken out of it: alone, as peft's files, or merged into the weights that it stood beside."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from phalanx.checkpoint.export import Selection, everything
from phalanx.checkpoint.manager import Checkpoint
from phalanx.checkpoint.manifest import Held
from phalanx.errors import WrongUse
from phalanx.models.adapters import CONFIG, PREFIX, WEIGHTS, adapter_config
from phalanx.models.lora import (
    FOUR_BITS,
    MAGNITUDE,
    A,
    B,
    FourBitLoraLinear,
    LoraLinear,
    is_four_bit,
    is_lora,
    merged,
)
from phalanx.models.nf4 import FourBits, dequantised


@dataclass(frozen=True)
class LoraExport:
    """The linears of a described model that have LoRA, and what else it has."""

    linears: Mapping[str, LoraLinear]
    every: tuple[str, ...]
    """All linears, with LoRA or not."""
    weights: tuple[str, ...]
    """All of LoRA's."""
    base: Path | None
    """Where the model's own weights came from."""
    others: tuple[str, ...] = ()
    """What was trained beside LoRA, as the head of a reward model."""

    @classmethod
    def of(cls, model: nn.Module, base: Path | None) -> LoraExport | None:
        """None for a model without any."""
        modules = dict(model.named_modules())
        found = {name: module for name, module in modules.items() if isinstance(module, LoraLinear)}
        inner = {f"{name}.{part}" for name in found for part in (A, B)}
        every = tuple(name for name, m in modules.items() if isinstance(m, nn.Linear) and name not in inner)
        weights = tuple(name for name, _ in model.named_parameters() if is_lora(name))
        others = tuple(n for n, weight in model.named_parameters() if weight.requires_grad and not is_lora(n))
        return cls(found, every, weights, base, others) if found else None

    def alone(self) -> Selection:
        """LoRA under peft's names."""
        if self.others:
            raise WrongUse(
                f"{', '.join(self.others)} was trained beside LoRA, and would be lost without it. Export with --merge."
            )
        return Selection({PREFIX + name: name for name in self.weights}, file=Path(WEIGHTS).stem)

    def describing(self, along: Callable[[Path], None]) -> Callable[[Path], None]:
        """Writes what peft wants to know, after what else belongs there."""
        lora = next(iter(self.linears.values())).lora
        said = adapter_config(lora, self.linears, self.every, None if self.base is None else str(self.base))

        def write(folder: Path) -> None:
            along(folder)
            (folder / CONFIG).write_text(json.dumps(said, indent=1))

        return write

    def merged(self, checkpoint: Checkpoint, beside: Sequence[str] = ()) -> Selection:
        """The model's own weights, with LoRA in them; nothing of the modules ``beside`` it."""
        weights, every = checkpoint.manifest.weights(), everything(checkpoint).without(beside).names
        own = {name: name for name in every if not is_lora(name) and not is_four_bit(name)}
        rounded = {f"{name}.weight": one for name, one in self.linears.items() if isinstance(one, FourBitLoraLinear)}
        dtype = max((weights[name] for name in own), key=lambda held: math.prod(held.shape)).dtype
        new = {name: Held(dtype, (one.out_features, one.in_features)) for name, one in rounded.items()}
        return Selection(own | dict(zip(new, new, strict=True)), partial(_made, self.linears, dtype), new=new)


def _made(linears: Mapping[str, LoraLinear], dtype: str, checkpoint: Checkpoint, name: str) -> Tensor:
    owner = name.removesuffix(".weight")
    if owner not in linears or owner == name:
        return checkpoint.tensor(f"model/{name}")
    if isinstance(linear := linears[owner], FourBitLoraLinear):  # as it was computed with
        bits = FourBits(*(checkpoint.tensor(f"model/{owner}.{part}") for part in FOUR_BITS))
        weight = dequantised(bits, (linear.out_features, linear.in_features), torch.float32)
    else:
        weight = checkpoint.tensor(f"model/{name}")
    a, b = (checkpoint.tensor(f"model/{owner}.{part}.weight") for part in (A, B))
    dora = linear.lora_magnitude_vector is not None
    magnitude = checkpoint.tensor(f"model/{owner}.{MAGNITUDE}") if dora else None
    whole = merged(weight, a, b, magnitude, linear.scale)
    return whole.to(getattr(torch, dtype)) if isinstance(linear, FourBitLoraLinear) else whole
