"""What makes a run slow: one rank that the others wait for, data, communication, or what is done between steps."""

from __future__ import annotations

from statistics import median

import numpy as np

from phalanx.watch.diagnosis import Diagnosis
from phalanx.watch.evidence import Evidence
from phalanx.watch.host_notes import host_notes
from phalanx.watch.timeline import Timeline, lateness, timeline

STRAGGLES, STRAGGLES_SECONDS = 0.25, 0.02
"""A rank is slow if it computes for so much of a step longer than others do, and for so long at least."""
WAITS, WAITS_SECONDS = 0.3, 0.02
"""Steps wait for data if they do so for so much of their time, and for so long at least."""
EXPOSED, EXPOSED_SECONDS = 0.4, 0.25
"""Likewise for messages between ranks: small steps are mostly that, and nobody minds."""
BETWEEN, BETWEEN_SECONDS = 0.3, 2.0
"""Likewise for what is done between steps, all of it together."""
LEAST_STEPS, LAST_STEPS = 4, 32


def slow(evidence: Evidence) -> Diagnosis | None:
    """The first of these that is there, if any is."""
    lines = timelines(evidence)
    if not lines:
        return None
    found = _straggler(evidence, lines) or _data(evidence, lines) or _exposed(evidence, lines) or _between(lines)
    if found is not None:
        found.evidence += host_notes(evidence.run, found.host)
    return found


def timelines(evidence: Evidence) -> dict[int, Timeline]:
    """By rank, of steps that all of them have whole."""
    found = {rank: timeline(flight) for rank, flight in evidence.flights.items()}
    lines = {rank: line for rank, line in found.items() if line is not None}
    return lines if lines and min(len(line.steps) for line in lines.values()) >= LEAST_STEPS else {}


def usual_step(lines: dict[int, Timeline]) -> str:
    """A usual step in words, by its phases."""
    seconds = median(line.seconds for line in lines.values())
    parts = {
        phase: median(line.usual(phase) for line in lines.values())
        for phase in ("data", "forward", "backward", "reduce", "update", "checkpoint", "callbacks")
    }
    parts["waiting for other ranks"] = median(line.usual_wait for line in lines.values())
    shown = [f"{name} {value / seconds:.0%}" for name, value in parts.items() if value > 0.005 * seconds]
    return f"a step takes {told(seconds)}: {', '.join(shown)}"


def told(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _straggler(evidence: Evidence, lines: dict[int, Timeline]) -> Diagnosis | None:
    for rank, line in sorted(lines.items(), key=lambda each: -each[1].usual_busy):
        peers = [lines[other] for other in _peers(evidence, rank) if other in lines]
        if not peers:
            continue
        excess = line.usual_busy - median(peer.usual_busy for peer in peers)
        if excess < STRAGGLES_SECONDS or excess < STRAGGLES * line.seconds:
            return None
        more = {phase: line.usual(phase) - median(peer.usual(phase) for peer in peers) for phase in line.own}
        phase = max(more, key=lambda each: more[each])
        others = median(peer.usual(phase) for peer in peers)
        words = [
            f"{evidence.who(rank)} takes {told(line.usual(phase))} for {phase} in a step, where others take "
            f"{told(others)}",
            f"it computes for {told(line.usual_busy)} of a step and waits for {told(line.usual_wait)}; the others wait "
            f"for {told(median(peer.usual_wait for peer in peers))}",
        ]
        late = lateness(evidence.flights, [rank, *(peer.rank for peer in peers)], line.steps)
        if rank in late:
            words.append(
                f"it was the last to come to {late[rank][1]:.0%} of their collectives, {told(late[rank][0])} late "
                "on average"
            )
        frame = evidence.line(rank)
        place = frame.place if frame else ""
        return Diagnosis(
            False, f"slow: {evidence.who(rank)} holds the others up, by {told(excess)} in a step of "
            f"{told(line.seconds)}, in {phase}{f': {place}' if place else ''}",
            [*words, usual_step(lines)],
            next=_advice(phase, evidence.host(rank)),
            kind="slow", rank=rank, host=evidence.host(rank), place=place, step=line.steps[-1] + 1,
        )  # fmt: skip
    return None


def _advice(phase: str, host: str) -> str:
    if phase == "data":
        return "Read ahead with --set workers=4, or look at what that rank's samples are read from."
    if phase == "callbacks":
        return "Look at what callbacks do on that rank alone."
    return f"Look at {host}: another job on it, heat, a slower device. Or the samples of that rank take longer."


def _peers(evidence: Evidence, rank: int) -> list[int]:
    """Ranks that compute the same: all, or where there are stages of a pipeline, those of the same one."""
    own = evidence.flights[rank].groups
    staged = any(row.axis.startswith("pp") for row in own.values())
    shared = {name for name, row in own.items() if not staged or not (row.axis == "world" or "pp" in row.axis)}
    return [other for other, flight in evidence.flights.items() if other != rank and shared & flight.groups.keys()]


def _data(evidence: Evidence, lines: dict[int, Timeline]) -> Diagnosis | None:
    waits = {rank: line.usual("data") for rank, line in lines.items()}
    usual, seconds = median(waits.values()), median(line.seconds for line in lines.values())
    if usual < WAITS_SECONDS or usual < WAITS * seconds:
        return None
    rank = max(waits, key=lambda each: waits[each])
    frame = evidence.line(rank)
    reading = frame is not None and evidence.flights[rank].phase == "data"
    return Diagnosis(
        False, f"slow: steps wait for data, {told(usual)} of {told(seconds)}",
        [f"{evidence.who(rank)} waits longest, {told(waits[rank])}", usual_step(lines)],
        next="Read ahead with --set workers=4, or with more of them, or make data() quicker.",
        kind="slow", rank=rank, host=evidence.host(rank), place=frame.place if frame and reading else "",
    )  # fmt: skip


def _exposed(evidence: Evidence, lines: dict[int, Timeline]) -> Diagnosis | None:
    usual = median(line.usual_wait for line in lines.values())
    seconds = median(line.seconds for line in lines.values())
    if any(line.on_gpu for line in lines.values()):  # by its own clock
        steps = [event["seconds"] for event in evidence.run.events(0, "step")][-LAST_STEPS:]
        usual = median([step.get("reduce", 0.0) + step.get("wait", 0.0) for step in steps] or [0.0])
    if usual < EXPOSED_SECONDS or usual < EXPOSED * seconds:
        return None
    axes = {row.axis for flight in evidence.flights.values() for row in flight.groups.values()}
    staged = any(axis.startswith("pp") for axis in axes)
    return Diagnosis(
        False, f"slow: ranks wait for messages of each other, {told(usual)} of a step of {told(seconds)}",
        [usual_step(lines)],
        next="Stages of a pipeline wait less with more micro-batches a step (micro_batch=), or with schedule=zb."
        if staged
        else "Larger micro-batches send less often; phalanx doctor measures how fast ranks reach each other.",
        kind="slow",
    )  # fmt: skip


def _between(lines: dict[int, Timeline]) -> Diagnosis | None:
    advice = {
        "checkpoint": "Save less often (--save-steps, --memory-steps), or to a quicker disk (--checkpoints).",
        "evaluation": "Evaluate less often (evaluate_every), or on fewer samples.",
        "callbacks": "Look at what the task's callbacks do in each step.",
    }
    for phase, remedy in advice.items():
        found = [line.share(phase) for line in lines.values()]
        spent, share = (float(np.median([each[column] for each in found])) for column in range(2))
        if spent >= BETWEEN_SECONDS and share >= BETWEEN:
            return Diagnosis(
                False, f"slow: {share:.0%} of the last steps' time went to {phase}, {told(spent)}",
                [usual_step(lines)], next=remedy, kind="slow",
            )  # fmt: skip
    return None
