"""Why a run is stuck, dead, wrong or slow, from its folder alone: the first of these that is so, with its evidence."""

from __future__ import annotations

import re
import time
from typing import Any

from phalanx import user_code
from phalanx.run import Run
from phalanx.watch.bad_numbers import wrong
from phalanx.watch.diagnosis import Diagnosis
from phalanx.watch.evidence import Evidence
from phalanx.watch.goodput import goodput
from phalanx.watch.slowness import crowded, slow, timelines, usual_step
from phalanx.watch.stuck import SHOWN, desynchronised, still, still_for_long, stuck
from phalanx.words import many

OLD_SECONDS = 60.0
"""A record of a run that goes on should not be older."""
LONG_AGO = 1000
"""Steps since a bad number after which it is told besides."""


def why(run: Run, stacks: bool = False, live: str | None = None) -> Diagnosis:
    """``stacks``: tell those of all ranks too, as they were last asked for. ``live``: who runs it, if that is known."""
    evidence = Evidence.of(run, live)
    bad = wrong(evidence.noted)
    ended_by_it = bad if evidence.failures and (evidence.failures[0]["final"] or _raised(evidence)) else None
    gravest = ended_by_it or _failure(evidence) or (bad if _is_recent(evidence, bad) else None)
    found = gravest or slow(evidence) or _nothing(evidence)
    found.evidence += _also(evidence, found.holds)
    if bad is not None and found is not bad:
        found.evidence.append(f"besides: {bad.summary}")
    if (spent := goodput(evidence.noted)) is not None:
        found.evidence.append(str(spent))
    if stacks:
        found.stacks = {rank: each.text for rank, each in evidence.stacks.items()}
        if not found.stacks:
            found.evidence.append("there are no stacks: none were taken before it ended")
    return found


def _raised(evidence: Evidence) -> bool:
    """Whether ranks ended since they disagreed, which each of them has raised."""
    return [event["kind"] for event in evidence.events("start", "step", "corrupted")][-1:] == ["corrupted"]


def _is_recent(evidence: Evidence, bad: Diagnosis | None) -> bool:
    """Or it was long ago, and all went well since: other things matter more."""
    last = evidence.events("step")[-1:]
    if bad is None or bad.step is None or not last:
        return True
    newest = max([bad.step, *(event["step"] for event in evidence.events("bad", "corrupted"))])
    return bool(last[0]["step"] - newest <= LONG_AGO)


def _failure(evidence: Evidence) -> Diagnosis | None:
    """What ended a generation, or holds it up."""
    return desynchronised(evidence) or _died(evidence) or stuck(evidence)


def _died(evidence: Evidence) -> Diagnosis | None:
    if evidence.done or evidence.stopped:
        return None
    if not evidence.failures:
        return None if evidence.live or evidence.ended or not evidence.generation else _silent(evidence)
    first, *others = evidence.failures
    if first["stuck"] or first["timed_out"]:
        return None
    rank, reason = first["rank"], first["reason"]
    frame = evidence.line(rank)
    place = _place(first["trace"]) or (frame.place if frame and frame.is_users else "")
    told = [first["trace"].rstrip()] if first["trace"] else []
    told += [f"the whole traceback is in {first['file']}"] if first["file"] else []
    if (flight := evidence.flights.get(rank)) is not None:
        told.append(f"it was in {flight.phase}, in step {flight.step + 1}")
    told += [_followed(each) for each in others[:SHOWN]]
    return Diagnosis(
        False, f"died: {evidence.who(rank)} failed first, after {many(first['steps'], 'step')}: {reason}"
        + (f", at {place}" if place else ""),
        told, next=_mend(evidence, reason, place), kind="died", rank=rank, host=evidence.host(rank),
        step=flight.step + 1 if flight is not None else first["steps"] + 1, place=place,
    )  # fmt: skip


def _followed(failure: dict[str, Any]) -> str:
    after = " as a consequence" if failure["secondary"] else ""
    return f"rank {failure['rank']} on {failure['host']}{after}: {failure['reason']}"


def _place(trace: str) -> str:
    """The innermost line of the user's."""
    found = re.search(r'File "([^"\n\0]+)", line (\d{1,9})', trace)
    return user_code.place(found[1], int(found[2])) if found else ""


def _mend(evidence: Evidence, reason: str, place: str) -> str:
    again = f"then phalanx train --resume --run {evidence.run.in_shell}"
    if "has done so here" in reason:
        return f"Its host had no memory left: fewer ranks or workers on it, or smaller micro-batches; {again}"
    if "SIGKILL" in reason:
        return f"Look who ended it: a scheduler's limit, a person, the system's log (dmesg); {again}"
    return f"Mend {place or 'that'}, {again}"


def _silent(evidence: Evidence) -> Diagnosis:
    """Nobody runs it, and nobody said why."""
    flights = evidence.flights.values()
    steps = max(evidence.ledger(), default=-1) + 1
    told = _last_seen(evidence)
    host = next((each.host for each in flights), "")
    return Diagnosis(
        False, f"died: its supervisor{f' on {host}' if host else ''} ended without a word, after "
        f"{many(steps, 'step')}: it was killed, or its host went down",
        told, next=f"Look at the host's log, then phalanx train --resume --run {evidence.run.in_shell}", kind="died",
        host=host, step=steps + 1,
    )  # fmt: skip


def _last_seen(evidence: Evidence) -> list[str]:
    return [
        f"rank {each.rank} on {each.host} was in {each.phase}, in step {each.step + 1}, "
        f"at {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(each.saved / 1e9))}"
        for each in list(evidence.flights.values())[:SHOWN]
    ]


def _nothing(evidence: Evidence) -> Diagnosis:
    steps = max(evidence.ledger(), default=-1) + 1
    state = "done" if evidence.done else "it was asked to stop" if evidence.stopped else "it runs"
    if evidence.ended and not evidence.done and not evidence.live:
        state = "it came to its end, and is not certified"
    if evidence.cut_short:
        state += ", and ended when its time to save was over"
    if not evidence.generation:
        state = "no rank of it has started yet"
    lines = timelines(evidence)
    told = _last_seen(evidence) if evidence.cut_short else [usual_step(lines), *crowded(lines)] if lines else []
    for rank in still_for_long(evidence) if evidence.live else ():
        flight = evidence.flights[rank]
        told.append(
            f"{evidence.who(rank)} has been in {flight.phase} for {still(flight):.0f} s, and nobody waits for it"
        )
    return Diagnosis(True, f"nothing wrong: {state}, after {many(steps, 'step')}", told)


def _also(evidence: Evidence, healthy: bool) -> list[str]:
    """What is good to know besides."""
    told = []
    if evidence.stopped and not healthy:
        short = ", before it had saved its last steps" if evidence.cut_short else ""
        told.append(f"it was asked to stop, by a person (Ctrl-C), a scheduler or phalanx cancel, and did{short}")
    if (before := evidence.before()) is not None:
        found = _failure(before)
        first = before.failures[0]
        what = found.summary if found else f"rank {first['rank']} {first['reason']}"
        told.append(f"before, in generation {before.generation}, after which ranks were started again: {what}")
    ages = [time.time() - flight.saved / 1e9 for flight in evidence.flights.values()]
    if evidence.live and ages and min(ages) > OLD_SECONDS:
        told.append(f"its supervisor has written nothing for {min(ages):.0f} s: {evidence.live}")
    return told
