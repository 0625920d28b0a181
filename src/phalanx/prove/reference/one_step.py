"""What one step did on one device: all that a layout's step is held against."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

State = dict[str, Tensor]


@dataclass
class Step:
    """What one step did on one device."""

    ids: np.ndarray
    """The sample in each slot."""
    read: list[tuple[int, str]]
    """What was read for each slot."""
    called: set[str] = field(default_factory=set)
    """Modules that were called, of those whose work takes messages under some layout."""
    samples: str = ""
    total: float = 0.0
    count: float = 0.0
    norm: float = 0.0
    clip_factor: float = 1.0
    skipped: bool = False
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By weight, what its optimizer goes by: learning rate, decay and the like."""
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    """Of the mean loss, before clipping; None where a weight got none."""
    moments: dict[str, State] = field(default_factory=dict)
    weights: State = field(default_factory=dict)
    buffers: State = field(default_factory=dict)
    in_use: State | None = None
    """Weights as ranks compute with them, where those are others."""
    factors: dict[str, float] = field(default_factory=dict)
    """What clipping multiplies each weight's gradient by."""
    terms: float = 0.0
    """Those of the loss that all ranks know of since the step before; with sites, of all of them."""
    agreed: State | None = None
    velocity: State | None = None
    """With sites: what they have agreed on after it, and what the outer optimizer carries on."""

    def clipped(self, name: str) -> Tensor | None:
        """What the optimizer is given of a weight."""
        gradient = self.gradients.get(name)
        return None if gradient is None else gradient * self.factors[name]
