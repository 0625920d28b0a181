"""A layout that fails, made small: parts of it are left out for as long as it fails at the same rung."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from phalanx.layout import CHOICES, DEGREES, Layout
from phalanx.prove.cases import Docket
from phalanx.prove.ladder import first
from phalanx.prove.ranks.outcome import ProofRanks, TrialOutcome
from phalanx.prove.reference.activations import rounding

OPTIONS = ("zero", "exact", *CHOICES, "comm")
INNERMOST_FIRST = ("ep", "tp", "cp", "pp", "fsdp", "dp")


@dataclass
class Shrinking:
    """Runs smaller and smaller layouts of one proof."""

    docket: Docket
    ranks: ProofRanks

    def minimal(self, layout: Layout, number: int, found: TrialOutcome) -> tuple[Layout, TrialOutcome]:
        """The smallest layout that still fails like ``found``, as it is run."""
        tried: set[Layout] = set()
        if rounding(layout):  # what it is held against is its own
            return self.docket.cases[number].as_run(layout), found
        while (less := self._less(layout, number, found, tried)) is not None:
            layout, found = less
        return self.docket.cases[number].as_run(layout), found

    def _less(
        self, layout: Layout, number: int, found: TrialOutcome, tried: set[Layout]
    ) -> tuple[Layout, TrialOutcome] | None:
        """The first layout with one part less that fails alike."""
        for less in smaller(layout):
            run = self.docket.cases[number].as_run(less)
            if run in tried or not self._comparable(run, number):
                continue
            tried.add(run)
            again = self.ranks.attest(number, run)
            if not again.unfinished and again.differences and _alike(again, found):
                return less, again
        return None

    def axes(self, layout: Layout, number: int) -> list[str]:
        """What a minimal layout cannot do without."""
        axes = [axis for axis in DEGREES if getattr(layout, axis) > 1]
        if layout.ep > 1 and layout.fsdp * layout.cp == layout.ep:
            axes = [axis for axis in axes if axis not in ("fsdp", "cp")]  # which only hold the experts' ranks
        plain = Layout()
        axes += [f"{name}={getattr(layout, name)}" for name in OPTIONS if getattr(layout, name) != getattr(plain, name)]
        whole = replace(layout, micro_batch=None)
        if not rounding(layout) and self._comparable(whole, number) and self.docket.cases[number].micro_batches == 1:
            again = self.ranks.attest(number, whole)
            if not again.fails:
                axes.append("micro-batches")
        return axes

    def _comparable(self, layout: Layout, number: int) -> bool:
        """Whether a case's reference has the micro-batches that a layout has, where that matters."""
        case = self.docket.cases[number]
        return case.micro_batches == 1 or layout.micro_batches(case.task.global_batch) == case.micro_batches


def smaller(layout: Layout) -> Iterator[Layout]:
    """Layouts with one part less than this."""
    for axis in INNERMOST_FIRST:
        if getattr(layout, axis) > 1:
            without = _with(layout, axis, 1)
            yield without if not (without.fsdp * without.cp) % without.ep else replace(without, ep=1)
    for axis in INNERMOST_FIRST:
        if getattr(layout, axis) > 2:
            yield _with(layout, axis, 2)
    for option in OPTIONS:
        if getattr(layout, option) != getattr(Layout(), option):
            yield _with(layout, option, getattr(Layout(), option))


def _with(layout: Layout, name: str, value: Any) -> Layout:
    return replace(layout, **{name: value})


def _alike(one: TrialOutcome, other: TrialOutcome) -> bool:
    """Whether two runs fail at the same rung: otherwise it may be for another reason."""
    return first(one.differences)[0].rung == first(other.differences)[0].rung
