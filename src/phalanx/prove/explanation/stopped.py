"""A layout that could not be run to its end: who stopped first, and which collective did not come together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from phalanx import user_code
from phalanx.layout import Layout
from phalanx.parallel.communication.mesh import AXES
from phalanx.prove.explanation.finding import Finding
from phalanx.prove.ladder import Difference, first
from phalanx.prove.ranks.trial import Call, Stopped
from phalanx.torch_errors import About, is_about

LET_DOWN = (About.WAITED, About.GONE, About.UNREACHED)
"""What ranks say that another one let down."""


def explain_stop(
    layout: Layout, ranks: Sequence[int], stopped: Mapping[int, Stopped], seen: Sequence[Difference]
) -> Finding:
    """``ranks`` did not finish; of those that could still say why, ``stopped`` holds what they said.

    What they had ``seen`` until then may be the cause.
    """
    axes = [axis for axis in AXES if getattr(layout, axis) > 1]
    rung = next((stop.rung for stop in stopped.values()), "running")
    finding = Finding(rung, "the run", -1, float("inf"), list(ranks), axes, minimal=str(layout))
    finding.step = max((stop.step for stop in stopped.values()), default=-1)
    own = {rank: stop for rank, stop in stopped.items() if not is_about(stop.reason, *LET_DOWN)}
    if own:
        _say_error(finding, own)
        if seen and rung == "resume":  # ranks that differ already cannot save one state
            _say_seen(finding, first(seen)[0])
        return finding
    _say_waiting(finding, layout, ranks, [rank for rank in ranks if rank not in stopped])
    for axis, odd, words in _disorder({rank: stop.calls for rank, stop in stopped.items()}):
        finding.axes, finding.name, finding.cause = [axis], words, f"{finding.cause} {words}."
        finding.ranks = odd or finding.ranks
        break
    if seen:
        _say_seen(finding, first(seen)[0])
    return finding


def _say_error(finding: Finding, own: Mapping[int, Stopped]) -> None:
    """Some ranks stopped by themselves."""
    rank, stop = next(iter(own.items()))
    told = stop.reason.splitlines()[0]
    finding.shape, finding.ranks, finding.name = "error", sorted(own), told[:120]
    finding.step, finding.where = stop.step, _last_line(stop.trace)
    finding.cause = f"rank {rank} stopped with an error, and the others with it: {told}"


def _say_waiting(finding: Finding, layout: Layout, ranks: Sequence[int], gone: Sequence[int]) -> None:
    """Ranks waited for one that is ``gone``, or for each other."""
    if gone and len(gone) < len(ranks):
        finding.shape, finding.ranks, finding.name = "gone", list(gone), "a rank ended"
        finding.cause = (
            f"rank {', '.join(map(str, gone))} died, or gave no answer, while the others waited for it. A rank ends so "
            "when messages of one collective do not have one size, or when memory runs out."
        )
        return
    finding.shape, finding.name, finding.cause = "hang", "a collective", "ranks waited for each other in vain."
    left = [rank for rank in range(layout.world) if rank not in ranks]
    if left:
        finding.cause = f"ranks waited for rank {', '.join(map(str, left))}, which had come to its end before them."


def _say_seen(finding: Finding, lead: Difference) -> None:
    """Something differed before ranks stopped."""
    told = f"{lead.found} where one device has {lead.expected}" if lead.found else f"off by {lead.error:.1e}"
    finding.rung, finding.name, finding.step, finding.ranks = lead.rung, lead.name, lead.step, [lead.rank]
    finding.shape = "stopped"
    finding.cause = f"{lead.name} differs on rank {lead.rank} ({told}), and then {finding.cause}"


def _disorder(calls: Mapping[int, Sequence[Call]]) -> list[tuple[str, list[int], str]]:
    """Axes along which ranks did not launch the same collectives, with those that are in the minority."""
    found = []
    axes = list(dict.fromkeys(call[0] for log in calls.values() for call in log if not call[0].startswith("pp ")))
    for axis in axes:
        logs = {rank: [call[1:] for call in log if call[0] == axis] for rank, log in calls.items()}
        logs = {rank: log for rank, log in logs.items() if log}
        for place in range(max(map(len, logs.values()))):
            here = {rank: log[place] if place < len(log) else None for rank, log in logs.items()}
            votes = Counter(here.values())
            if len(votes) > 1:
                most = votes.most_common(1)[0][0]
                odd = [rank for rank, call in here.items() if call != most]
                did = here[odd[0]]
                theirs = "launched none" if did is None else f"launched {did[0]} of {did[1]} elements"
                said = "none" if most is None else f"{most[0]} of {most[1]} elements"
                others = "most ranks have" if votes[most] > len(here) / 2 else "another has"
                words = f"as collective {place} over {axis}, rank {odd[0]} {theirs} where {others} {said}"
                found.append((place - len(logs[odd[0]]), axis, odd, words))
                break
    return [(axis, odd, words) for _, axis, odd, words in sorted(found, key=lambda item: -item[0])]


def _last_line(trace: str) -> str:
    """File and line where an error was raised: the innermost of the user's own, if it came through one."""
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith('File "')]
    places = [(line.split('"')[1], line.split("line ")[1].split(",")[0]) for line in lines]
    theirs = [place for place in places if user_code.is_users(place[0])]
    if not places:
        return ""
    file, number = (theirs or places)[-1]
    return user_code.place(file, int(number)) if theirs else f"{file}:{number}"
