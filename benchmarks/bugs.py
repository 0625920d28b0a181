"""A scoreboard: known bugs planted one by one, whether each is caught, named rightly, and in what time; and clean runs.

python benchmarks/bugs.py [--quick] [--only NAME ...] [--markdown]

Caught: the proof does not hold. Place: the tensor, module or phase that the bug is in is named. Axis: the axis that it
takes is. Factor: what was planted as a factor is reported as that. A clean control is the same task and layout without
the bug: a finding there is a false alarm.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from phalanx.prove.bugs.known import BUGS
from phalanx.prove.bugs.planting import Bug
from phalanx.prove.proof import prove
from phalanx.references import find_task
from report import Figure, report

QUICK = 6


@dataclass
class Score:
    """What a proof said of one bug."""

    bug: Bug
    caught: bool
    place: bool
    axis: bool
    factor: bool
    said: str
    seconds: float


def score(bug: Bug) -> Score:
    started = time.perf_counter()
    proof = prove(find_task(bug.task)(**bug.settings), [bug.layout], inject=bug.name, dtype=bug.dtype)
    seconds = time.perf_counter() - started
    finding = proof.results[0].finding if proof.results else None
    if finding is None:
        return Score(bug, False, False, False, False, "", seconds)
    words = " ".join([f"{finding.rung}: {finding.name}", *finding.affected])
    axes = ", ".join(finding.axes) or "one device"
    factor = bug.factor is None or (finding.factor is not None and abs(finding.factor - bug.factor) < 1e-6)
    said = f"{finding.rung}: {finding.name} ({finding.shape}) over {axes}"
    return Score(
        bug, not proof.holds, any(word in words for word in bug.place.split("|")),
        bug.axis in finding.axes if bug.axis else not finding.axes, factor, said, seconds,
    )  # fmt: skip


def controls(bugs: list[Bug]) -> Iterator[tuple[str, bool]]:
    """The same tasks and layouts without a bug."""
    by_task: dict[str, tuple[Bug, set[str]]] = {}
    for bug in bugs:
        settings = ",".join(f"{name}={value}" for name, value in bug.settings.items())
        by_task.setdefault(f"{bug.task} {settings}", (bug, set()))[1].add(bug.layout)
    for name, (bug, layouts) in by_task.items():
        for result in prove(find_task(bug.task)(**bug.settings), sorted(layouts)).results:
            yield f"{name} {result.layout}", result.verdict == "equal"


def _mark(right: bool) -> str:
    return "yes" if right else "NO"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few of them, in under a minute")
    parser.add_argument("--only", nargs="+", choices=list(BUGS), metavar="NAME")
    parser.add_argument("--markdown", action="store_true", help="print the table as RESULTS.md has it")
    options = parser.parse_args()
    bugs = [BUGS[name] for name in options.only or BUGS]
    bugs = bugs[:: len(bugs) // QUICK] if options.quick else bugs
    scores = []
    if options.markdown:
        columns = ("bug", "row", "layout", "caught", "place", "axis", "factor", "said", "seconds")
        print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for bug in bugs:
        scores.append(made := score(bug))
        marks = [_mark(right) for right in (made.caught, made.place, made.axis)]
        marks.append(_mark(made.factor) if bug.factor is not None else "")
        cells = [bug.name, str(bug.row or ""), f"`{bug.layout}`", *marks, made.said, f"{made.seconds:.1f}"]
        if options.markdown:
            print(f"| {' | '.join(cells)} |", flush=True)
        else:
            told = " ".join(f"{mark:<3}" for mark in marks)
            print(f"{bug.name:<40} {bug.layout:<14} {told} {made.seconds:5.1f}  {made.said}", flush=True)
    clean = list(controls(bugs))
    for name, right in clean:
        if not right:
            print(f"FALSE ALARM on {name}")
    total = len(scores)
    factors = [s for s in scores if s.bug.factor is not None]
    report([
        Figure("bugs not caught", sum(not s.caught for s in scores), 0, f"of {total}"),
        Figure("place or axis not named, share", sum(not (s.place and s.axis) for s in scores) / total, 0.1),
        Figure("planted factors not reported", sum(not s.factor for s in factors), 0, f"of {len(factors)}"),
        Figure("false alarms", sum(not right for _, right in clean), 0, f"of {len(clean)} clean runs"),
        Figure("seconds a bug", sum(s.seconds for s in scores) / total, None, "with its reference and its explanation"),
    ])  # fmt: skip


if __name__ == "__main__":
    main()
