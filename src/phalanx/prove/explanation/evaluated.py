"""An evaluation that gives something else than on one device, of weights that are right."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.prove.explanation.finding import Finding
from phalanx.prove.explanation.sites import location
from phalanx.prove.ladder import Difference, first
from phalanx.prove.reference.evaluation import SEEN, measured, off_by
from phalanx.prove.reference.hostile import Hostile
from phalanx.prove.reference.loop import Reference
from phalanx.task import Task
from phalanx.train.evaluate import evaluate

ROUNDED = 1e-5
"""What rounding to float32 makes of a measure is less."""


def explain_evaluation(task: Task, found: Sequence[Difference], axes: Sequence[str], minimal: str) -> Finding:
    """What held-out data gives, though all that was trained is right."""
    rung = first(found)
    lead, names = rung[0], list(dict.fromkeys(d.name for d in rung))
    count = next((d for d in rung if d.name.startswith("count of ")), None)
    lead = count or lead
    others = [name for name in names if name != lead.name]
    ranks = sorted({d.rank for d in rung if d.name == lead.name})
    finding = Finding(lead.rung, lead.name, lead.step, lead.error, ranks, list(axes), "measures", affected=others)
    finding.minimal, finding.where = minimal, location(evaluate)
    finding.next = "Mend it, then prove this layout again."
    finding.cause = f"weights are right, and on held-out data {lead.name} is {lead.found}, not {lead.expected}."
    mixed, error = mixing(task)
    own = super(Hostile, task).evaluate  # type: ignore[misc]
    if mixed and error < ROUNDED:
        finding.shape, finding.where = "precision", location(own)
        finding.cause += (
            f" On one device, too, {mixed} changes by {error:.0e} with the samples that are computed together: it is "
            "rounded to float32 where a proof cannot see it, as in numpy. Compute it in float64: np.float64, "
            "astype(float), .double()."
        )
    elif mixed:
        finding.shape, finding.where = "mixes samples", location(own)
        finding.cause += (
            f" On one device, too, {mixed} depends on which samples are computed together: evaluate() must give sums "
            "over samples and their counts, Loss(total, count), or rows of single samples."
        )
    elif count is not None:
        finding.shape, finding.factor = "ratio", float(lead.found) / float(lead.expected or 1)
        finding.cause += " Some samples count more than once, not at all, or only stand in for a rank that has none."
    return finding


def mixing(task: Task) -> tuple[str, float]:
    """The measure that changes most on one device if samples are computed one by one, and by how much."""
    reference = Reference(task)
    together, alone = measured(reference), measured(reference, one_by_one=True)
    assert together is not None
    assert alone is not None
    one_by_one = dict(alone.items())
    errors = {name: off_by(one_by_one.get(name), value) for name, value in together.items()}
    worst = max(errors, key=lambda name: errors[name], default="")
    return (worst, errors[worst]) if worst and errors[worst] > SEEN else ("", 0.0)
