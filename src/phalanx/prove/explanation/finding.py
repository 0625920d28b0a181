"""A finding: where a layout first leaves the path of one device, what the error looks like, and why, in words."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Finding:
    """The first rung that fails, explained."""

    rung: str
    name: str
    """The first tensor, module or setting that differs."""
    step: int
    error: float
    ranks: list[int]
    """Where it differs."""
    axes: list[str]
    """The axes without which it does not happen; ``micro-batches`` among them."""
    shape: str = ""
    """What the error looks like: ``ratio``, ``missing sum``, ``double sum``, ``some samples``, ``stale``, ..."""
    factor: float | None = None
    cause: str = ""
    affected: list[str] = field(default_factory=list)
    """Other tensors of the same rung that differ."""
    where: str = ""
    """File and line, where they can be known."""
    minimal: str = ""
    """The smallest layout that still shows it."""
    next: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        on = f"ranks {', '.join(map(str, self.ranks))}" if len(self.ranks) > 1 else f"rank {self.ranks[0]}"
        others = f", and {len(self.affected)} more" if self.affected else ""
        lines = [f"step {self.step}, {self.rung}: {self.name}{others} (off by {self.error:.1e}, on {on})", self.cause]
        if self.affected:
            lines.append("also: " + ", ".join(self.affected[:6]) + (" ..." if len(self.affected) > 6 else ""))
        if self.minimal:
            lines.append(f"smallest layout that shows it: {self.minimal}")
        if self.where:
            lines.append(f"look at: {self.where}")
        return "\n".join(textwrap.indent(textwrap.fill(line, 116), "    ") for line in lines if line)
