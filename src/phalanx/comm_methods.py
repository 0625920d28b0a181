"""What is known of each method that ``comm=auto`` may choose: one line each.

A method joins by its line here and its codec in `parallel.communication.codecs.chosen`. How fast a codec is, and how
fast the link, is measured where a run is; how much a loss changes cannot be, so it stands here with where it was seen.
"""

from __future__ import annotations

from dataclasses import dataclass

TOLERANCE = 0.5
"""Percent that a loss may be higher for a method to be chosen, by default."""


@dataclass(frozen=True)
class Candidate:
    """A way for gradients to travel."""

    name: str
    bytes: float
    """Of those that are sent of float32 as it is."""
    loss: float
    """Percent by which a held-out loss was higher than without, after the same samples; a mean."""
    seen: str
    """Where."""


CANDIDATES = (
    Candidate("exact", 1.0, 0.0, "nothing is rounded but sums"),
    Candidate("bf16", 1 / 2, 0.0, "1.8829 to 1.8826, 400 steps of a small transformer with AdamW, 2 ranks"),
    Candidate("int8", 1 / 3.94, -0.2, "1.8789 to 1.8826, the same"),
    Candidate("int4", 1 / 7.53, 0.3, "-0.3 and 0.2 % after 400 steps, 1.1 and 0.1 % after 1,600, two seeds each"),
)
"""From the most exact to the least."""


def allowed(tolerance: float) -> list[Candidate]:
    """Those whose losses are at most so many percent higher; exact sums always."""
    return [method for method in CANDIDATES if method.loss <= max(0.0, tolerance)]
