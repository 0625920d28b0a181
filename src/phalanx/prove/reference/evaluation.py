"""Evaluation proven: what a task measures on held-out data on one device, by a plain loop, and what differs from it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from phalanx.data.joined import JoinedSamples
from phalanx.data.order import share
from phalanx.data.seeding import seed_globally
from phalanx.logits import Logits
from phalanx.prove.reference.hostile import wide_batch
from phalanx.task import as_loss
from phalanx.train.collecting import Collected, Gathered, check_alike, numbers, whole_of
from phalanx.train.evaluate import checked
from phalanx.train.totals import OF, spelled_out

if TYPE_CHECKING:
    from phalanx.prove.reference.loop import Reference

SEEN = 1e-9
SHOWN = 8
"""So many samples are named."""


@dataclass
class Measures:
    """What an evaluation of all held-out samples gives."""

    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    gathered: Gathered = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)

    @property
    def rows(self) -> dict[str, Any]:
        return {f"{name} of each sample": rows for name, rows in self.gathered.items()}

    @property
    def summaries(self) -> dict[str, float]:
        return {f"summarised {name}": value for name, value in self.numbers.items()}

    def items(self) -> Iterator[tuple[str, Any]]:
        """All of it by name."""
        for key, (total, count) in self.sums.items():
            name = key.replace(OF, "/")
            yield f"count of {name}", count
            yield f"total of {name}", total
        yield from self.rows.items()
        yield from self.summaries.items()


@torch.no_grad()
def measured(reference: Reference, one_by_one: bool = False) -> Measures | None:
    """One device's, in as many micro-batches as it trains with or sample by sample; None if nothing is kept aside."""
    task, decisions = reference.task, reference.decisions
    seed_globally(task.seed, "held out")
    held: Any = task.held_out()
    if held is None:
        return None
    held = JoinedSamples(held, reference.known) if reference.known else held
    micro_batches = 1 if task.proof_trial.together else reference.micro_batches
    found, rows = Measures(), Collected(task)
    reference.model.eval()
    decisions.resting = True
    for first in range(0, len(held), task.global_batch):
        stop = min(first + task.global_batch, len(held))
        for slots in share(stop - first, stop - first if one_by_one else micro_batches, 1, 0):
            places = np.arange(*slots)
            batch = wide_batch(task, held, places + first)
            with reference.randomness.scope("task"):
                output = reference.output(first // task.global_batch, places, batch)
                measures = checked(task, task.evaluate(output, batch))
            for name, value in measures.items():
                _add(found, rows, name, value, places + first)
    decisions.resting = False
    for name, column in rows.columns.items():
        check_alike(task, name, set(column.kinds))
        found.gathered[name] = whole_of(column.parts)
    found.numbers = numbers(task, found.gathered) if rows.columns else {}
    return found


def _add(found: Measures, rows: Collected, name: str, value: Any, places: np.ndarray) -> None:
    value = value.tensor() if isinstance(value, Logits) else value
    if isinstance(value, (Tensor, list)):
        rows.add(name, value, places, real=True)
        return
    loss = as_loss(value, rows.task, f"evaluate, for {name!r},")
    for key, one in spelled_out(name, loss).items():
        total, count = found.sums.get(key, (0.0, 0.0))
        found.sums[key] = total + float(one.total), count + float(one.count or 0)


def off_by(found: Any, want: Any) -> float:
    """How far a measure is from what it should be."""
    if isinstance(want, Tensor) and isinstance(found, Tensor):
        if found.shape != want.shape or not torch.equal(found.isnan(), want.isnan()):
            return math.inf
        if want.is_floating_point():
            apart = float((found.nan_to_num() - want.nan_to_num()).norm())
            return apart / (float(want.nan_to_num().norm()) or 1.0) if apart else 0.0
        return 0.0 if torch.equal(found, want) else math.inf
    if isinstance(want, list) and isinstance(found, list) and len(found) == len(want):
        return max(map(off_by, found, want), default=0.0)
    if isinstance(want, float) and isinstance(found, float):
        if math.isfinite(found) and math.isfinite(want):
            return abs(found - want) / max(abs(want), 1e-300)
        return 0.0 if found == want or (math.isnan(found) and math.isnan(want)) else math.inf
    return 0.0 if found == want else math.inf


def in_words(found: Any, want: Any) -> tuple[str, str]:
    """A measure and what it should be, shortly."""
    if isinstance(want, float):
        return f"{found:.10g}", f"{want:.10g}"
    if len(found) != len(want):
        return f"{len(found)} rows", f"{len(want)} rows"
    rows = [row for row, (a, b) in enumerate(zip(found, want, strict=True)) if off_by(a, b) > SEEN]
    more = " ..." if len(rows) > SHOWN else ""
    return f"wrong for samples {', '.join(map(str, rows[:SHOWN]))}{more}", "as on one device"
