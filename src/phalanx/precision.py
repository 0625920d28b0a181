"""Precision: which dtype holds, computes, sums and updates. The same four dtypes mean the same in every layout.

Weights are cast where they are gathered and inputs where they enter a block; there is no ambient autocast.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phalanx.kernels.fp8 import Scaling
from phalanx.task import Precision
from phalanx.trees import mapped


@dataclass(frozen=True)
class Dtypes:
    """What each part of a step is done in."""

    parameter: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    optimizer: torch.dtype
    fp8: Scaling | None = None
    """How the linears of blocks are scaled, where they compute in 8 bits."""

    def table(self) -> str:
        """For the screen: ``parameter float32 | compute bfloat16 | ...``."""
        told = {name: str(dtype).removeprefix("torch.") for name, dtype in vars(self).items() if name != "fp8"}
        linears = {"linears of blocks": f"float8 {self.fp8}"} if self.fp8 else {}
        return " | ".join(f"{name} {what}" for name, what in {**told, **linears}.items())

    def notes(self, device: str) -> list[str]:
        """What it costs more than it should here."""
        if device != "cpu" or self.compute.itemsize > 2 or _in_half_width():
            return []
        name = str(self.compute).removeprefix("torch.")
        return [f"this processor has no arithmetic in {name}: steps may take many times as long as with fp32"]


def _in_half_width() -> bool:
    """Whether the processor computes in 16 bits itself: known by bf16's flags, and given the benefit of the doubt."""
    try:
        return "bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return True


DTYPES: dict[Precision, Dtypes] = {
    "fp32": Dtypes(torch.float32, torch.float32, torch.float32, torch.float32),
    "bf16": Dtypes(torch.float32, torch.bfloat16, torch.float32, torch.float32),
    "fp16": Dtypes(torch.float32, torch.float16, torch.float32, torch.float32),
    "fp8": Dtypes(torch.float32, torch.bfloat16, torch.float32, torch.float32, "tensorwise"),
    "fp8_rowwise": Dtypes(torch.float32, torch.bfloat16, torch.float32, torch.float32, "rowwise"),
    "float64": Dtypes(torch.float64, torch.float64, torch.float64, torch.float64),
}


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors in ``value``, however nested, in another dtype."""
    return mapped(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)
