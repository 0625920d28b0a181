"""What a proof came to: a result for every layout, and a verdict of them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from phalanx.prove.explanation.finding import Finding
from phalanx.prove.own_faults import OURS, REPORT
from phalanx.verdict import Verdict

EQUAL, DIFFERS, NOT_APPLICABLE, UNKNOWN = "equal", "differs", "not applicable", "unknown"


@dataclass
class Result:
    """What became of one layout."""

    layout: str
    verdict: str
    reason: str = ""
    """Why it is not applicable, or why nothing can be said."""
    worst: str = ""
    """The tensor that is furthest off."""
    error: float = 0.0
    seconds: float = 0.0
    finding: Finding | None = None


@dataclass
class Proof(Verdict):
    """A verdict with the result of every layout."""

    task: str = ""
    steps: int = 0
    sensitivity: float = 0.0
    """What one rounding at the beginning becomes on one device."""
    bar: float = 0.0
    """What follows from it: a difference above this is a finding."""
    buffer_bar: float = 0.0
    """The same for buffers."""
    shrunk: list[str] = field(default_factory=list)
    inject: str | None = None
    dtype: str | None = None
    """The precision that was proven beside float64."""
    results: list[Result] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    """The user's files that were imported, here or on a rank, with hashes: what it is a proof of."""
    unchecked: str = ""
    """Why the task was not checked on one device first, if it was not."""


def concluded(task: str, results: Sequence[Result]) -> Verdict:
    """Whether a task trains like one device, as far as the results of its layouts say."""
    by = {kind: [r for r in results if r.verdict == kind] for kind in (EQUAL, DIFFERS, NOT_APPLICABLE, UNKNOWN)}
    if by[DIFFERS]:
        summary = f"{task} does not train like one device under {len(by[DIFFERS])} of {len(results)} layouts"
        first_finding = by[DIFFERS][0].finding
        assert first_finding is not None
        return Verdict(False, summary, [f"{r.layout}\n{r.finding}" for r in by[DIFFERS]], first_finding.next)
    if by[UNKNOWN]:
        return Verdict(
            False, f"nothing can be said of {len(by[UNKNOWN])} of {len(results)} layouts of {task}: {OURS}",
            [f"{r.layout}: {r.reason}" for r in by[UNKNOWN]], REPORT, code=3,
        )  # fmt: skip
    if not by[EQUAL]:
        return Verdict(
            False, f"nothing was proven: none of {len(results)} layouts is applicable to {task}",
            [f"{r.layout}: {r.reason}" for r in by[NOT_APPLICABLE]],
            "Choose layouts that the model and the batch allow.", code=2,
        )  # fmt: skip
    rest = f"; {len(by[NOT_APPLICABLE])} not applicable" if by[NOT_APPLICABLE] else ""
    layouts = "1 layout" if len(by[EQUAL]) == 1 else f"{len(by[EQUAL])} layouts"
    return Verdict(True, f"{task} trains like one device under {layouts}{rest}")
