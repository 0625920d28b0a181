"""Samples that could not be read and were left out, told: once each, by one of the ranks that have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from phalanx.data.loader import Loader, StepBatch
from phalanx.events import say

if TYPE_CHECKING:
    from phalanx.train.engine import Engine

SHOWN = 8
"""So many are told on the screen by each rank; a run's events have all of them."""


def note_bad_samples(
    engine: Engine, loader: Loader, batch: StepBatch, write: Callable[..., Any] = lambda kind, **facts: None
) -> None:
    """Of a step's batch, to the screen and to ``write``, if they were not told before."""
    if not engine.mesh.counts_samples:
        return
    for number, reason in batch.bad:
        if number in loader.bad:
            continue
        loader.bad[number] = reason
        write("bad sample", step=batch.step, sample=number, reason=reason)
        if len(loader.bad) <= SHOWN:
            more = "; of others, events of the run tell" if len(loader.bad) == SHOWN else ""
            say(f"   note  sample {number} is left out: {reason}{more}")
