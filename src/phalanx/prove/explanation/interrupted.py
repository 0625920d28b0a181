"""A run that is not the same after an interruption: what was saved or restored wrongly, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.checkpoint.state import State
from phalanx.prove.explanation.finding import Finding
from phalanx.prove.explanation.sites import location
from phalanx.prove.ladder import Difference, first
from phalanx.prove.ranks.restored import KEPT, READ, RESUMED, WRITTEN
from phalanx.train.checkpointing import Checkpointer
from phalanx.train.engine import Engine

FAULTS = {
    WRITTEN: " The checkpoint itself has it so: it was written wrongly, or from another moment's state.",
    READ: " The checkpoint has it right: it was read wrongly.",
    KEPT: " The copy is made while the next step runs, whose update must wait for it.",
}
"""By where a saved state went wrong."""
SITES: dict[str, Any] = {WRITTEN: State.entries, READ: State.wanted, KEPT: Checkpointer.stage, RESUMED: Engine.resume}
"""Likewise, which code is responsible."""


def explain_resume(found: Sequence[Difference], axes: Sequence[str], minimal: str, half: int, saver: str) -> Finding:
    """A state that is not what was saved. ``saver`` is the layout whose checkpoint was taken up for a try."""
    rung = first(found)
    lead, names = rung[0], list(dict.fromkeys(d.name for d in rung))
    ranks, fault = sorted({d.rank for d in rung if d.name == lead.name}), lead.expected
    finding = Finding(lead.rung, lead.name, lead.step, lead.error, ranks, list(axes), fault, affected=names[1:])
    finding.minimal, finding.where = minimal, location(SITES[fault])
    told = f"{lead.found}.{FAULTS.get(fault, '')}"
    if lead.rung == "resume":
        finding.cause = f"the run was interrupted before step {half}, and when it was resumed, {told}"
    elif lead.rung == "ledger":
        finding.where = location(Engine.batches)
        finding.cause = f"the run was interrupted before step {half}, and does not go on there: {told}"
    else:
        finding.cause = f"what {saver} saved before step {half} was taken up under this layout, and {told}"
    return finding


def explain_interruption(
    lead: Difference, names: Sequence[str], axes: Sequence[str], minimal: str, half: int
) -> Finding:
    """What differs after an interruption alone, though all state was restored rightly."""
    rung = "ledger" if lead.rung == "samples" else "resume"
    finding = Finding(rung, lead.name, lead.step, lead.error, [lead.rank], list(axes), RESUMED, affected=list(names))
    finding.minimal, finding.where = minimal, location(Engine.batches if rung == "ledger" else Engine.resume)
    told = f" ({lead.found} where one device has {lead.expected})" if lead.found else ""
    finding.cause = (
        f"without an interruption this layout trains like one device. Interrupted before step {half} and resumed, with "
        f"all its tensors and counters as they were saved, it differs from step {lead.step} on: {lead.rung}, "
        f"{lead.name}{told}. Something that training depends on is not in what is saved."
    )
    return finding
