"""A finding made of a layout that fails: it is made small, run again in the ways that say more, and explained."""

from __future__ import annotations

import math
import traceback
from dataclasses import dataclass, replace

from phalanx.layout import Layout
from phalanx.prove.cases import Docket
from phalanx.prove.explanation.evaluated import explain_evaluation
from phalanx.prove.explanation.explain import Inquiry
from phalanx.prove.explanation.finding import Finding
from phalanx.prove.explanation.interrupted import explain_interruption, explain_resume
from phalanx.prove.explanation.stopped import explain_stop
from phalanx.prove.ladder import NARROW_MARGIN, RESUMING, Difference, first
from phalanx.prove.own_faults import in_words
from phalanx.prove.ranks.outcome import ProofRanks, TrialOutcome
from phalanx.prove.ranks.record import WholeStep
from phalanx.prove.reference.activations import rounding
from phalanx.prove.shrinking import Shrinking
from phalanx.task import Precision

NEXT = "Mend it, then prove this layout again."


def _unexplained(layout: Layout, found: TrialOutcome, trace: str) -> Finding:
    """What was found, where explaining it has failed."""
    seen = first(found.differences or found.seen_before_stopping)
    ended = Difference(-1, "running", "the run", math.inf, min(found.unfinished, default=0))
    lead = seen[0] if seen else ended
    told = f"{lead.found}, not {lead.expected}. " if lead.expected else ""
    return Finding(
        lead.rung, lead.name, lead.step, lead.error, [lead.rank], [], "unexplained", minimal=str(layout),
        cause=f"{told}That it differs stands. Why could not be found out: {in_words('explaining it', trace)}",
    )  # fmt: skip


@dataclass
class Findings:
    """Makes the findings of one proof."""

    docket: Docket
    ranks: ProofRanks
    dtype: Precision | None

    def of(self, layout: Layout, number: int, found: TrialOutcome) -> Finding:
        """A finding, explained if that can be done: what was found is not lost over it."""
        try:
            finding = self._explained(layout, number, found)
        except Exception:
            return _unexplained(layout, found, traceback.format_exc())
        finding.next = finding.next or NEXT
        return finding

    def _explained(self, layout: Layout, number: int, found: TrialOutcome) -> Finding:
        case = self.docket.cases[number]
        if found.unfinished:
            return explain_stop(case.as_run(layout), found.unfinished, found.stopped, found.seen_before_stopping)
        shrinking = Shrinking(self.docket, self.ranks)
        layout, found = shrinking.minimal(layout, number, found)
        interrupted = self._resume(layout, number, found)
        if interrupted is not None:
            return interrupted
        axes = shrinking.axes(layout, number)
        if case.standard.limits is not None:
            return self._narrow(layout, number, found, axes)
        if first(found.differences)[0].rung == "evaluation":
            return explain_evaluation(case.task, found.differences, axes, str(layout))
        if rounding(layout):
            return self._coded(layout, found, axes)
        step = first(found.differences)[0].step
        records = self.ranks.record(number, layout, step)
        whole = WholeStep.of(case.task, case.micro_batches, step)
        return Inquiry(case.task, layout, case.standard, found.differences, records, whole, axes).finding()

    def _resume(self, layout: Layout, number: int, found: TrialOutcome) -> Finding | None:
        """A finding, if it is that the run was interrupted which made the difference."""
        rung = first(found.differences)
        lead, half = rung[0], self.docket.cases[number].half
        shrinking = Shrinking(self.docket, self.ranks)
        if lead.rung in RESUMING and lead.step == half - 1:
            axes, saver = shrinking.axes(layout, number), self.ranks.saved_by(number)
            return explain_resume(found.differences, axes, str(layout), half, saver)
        if lead.step >= half and not self.ranks.attest(number, layout, interrupted=False).fails:
            names = [name for name in dict.fromkeys(d.name for d in rung) if name != lead.name]
            return explain_interruption(lead, names, shrinking.axes(layout, number), str(layout), half)
        return None

    def _coded(self, layout: Layout, found: TrialOutcome, axes: list[str]) -> Finding:
        """What one device does alone says nothing of sums in few bits, or of sites; the same layout without does."""
        rung = first(found.differences)
        lead, names = rung[0], list(dict.fromkeys(d.name for d in rung))
        without, how = replace(layout, comm="exact", activations="exact"), rounding(layout)
        does, kind = ("trains", "local updates") if layout.local else ("rounds", "few bits")
        where = f"parallel/communication/{'codecs' if layout.coded_axis else 'narrow.py'}"
        told = f"It is {lead.found}, and should be {lead.expected}." if lead.expected else lead.found
        return Finding(
            lead.rung, lead.name, lead.step, lead.error, sorted({d.rank for d in rung}), axes, kind,
            affected=names[1:], minimal=str(layout),
            cause=f"{lead.name} is not what one device finds that {does} as {how} is defined to. "
            f"{told}".rstrip(),
            next=f"Prove {without} first: if that holds, look at {'train/sites.py' if layout.local else where}.",
        )  # fmt: skip

    def _narrow(self, layout: Layout, number: int, found: TrialOutcome, axes: list[str]) -> Finding:
        """What float64 does not show can only lie in what is done to dtypes."""
        rung = first(found.differences)
        lead, names = rung[0], list(dict.fromkeys(d.name for d in rung))
        limit = self.docket.cases[number].standard.limit(lead.step, lead.rung)
        return Finding(
            lead.rung, lead.name, lead.step, lead.error, sorted({d.rank for d in rung}), axes,
            "precision", affected=names[1:], minimal=str(layout),
            cause=f"in float64 this layout trains like one device, and in {self.dtype} it does not: one device itself "
            f"is off by {limit / NARROW_MARGIN:.1e} at most there. {lead.found} Look at what is cast and where: the "
            "dtype in which messages travel and sums are kept, the loss scale, what is kept narrow between steps.",
        )  # fmt: skip
