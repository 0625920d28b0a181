"""What makes a run slow: a rank that compiles anew, or that others wait for; data, messages, what is between steps."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from phalanx.watch.diagnosis import Diagnosis
from phalanx.watch.evidence import Evidence
from phalanx.watch.host_notes import host_notes
from phalanx.watch.timeline import STEPS_OWN, Timeline, lateness, timeline, transfers
from phalanx.words import in_bytes, in_time, listed, many

STRAGGLES, STRAGGLES_SECONDS = 0.2, 0.02
"""A rank is slow if it computes for so much of a step longer than others do, and for so long at least."""
WAITS, WAITS_SECONDS = 0.3, 0.02
"""Steps wait for data if they do so for so much of their time, and for so long at least."""
EXPOSED, EXPOSED_SECONDS = 0.4, 0.25
"""Likewise for messages between ranks: small steps are mostly that, and nobody minds."""
BETWEEN, BETWEEN_SECONDS = 0.3, 2.0
"""Likewise for what is done between steps, all of it together."""
STARVED = 0.5
"""Where ranks have no processor for so much of the time that they could compute, what they wait for says nothing of
messages: their threads that send and receive have none either."""
STALLED, STALLED_SECONDS = 0.2, 2.0
"""Likewise for files that steps had to wait for, since ranks began."""
COMPILES, COMPILES_SHARE = 0.25, 0.1
"""A rank compiles anew if so many of its steps do, and for so much of their time."""
LEAST_STEPS, LAST_STEPS = 4, 32
SHOWN = 8


def slow(evidence: Evidence) -> Diagnosis | None:
    """The first of these that is there, if any is."""
    lines = timelines(evidence)
    if not lines:
        return _stalled(evidence)
    found = (
        _compiling(evidence, lines) or _straggler(evidence, lines) or _data(evidence, lines)
        or _stalled(evidence) or _exposed(evidence, lines) or _between(lines)
    )  # fmt: skip
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
    parts["other"] = max(0.0, seconds - sum(parts.values()))
    shown = [f"{name} {value / seconds:.0%}" for name, value in parts.items() if value > 0.005 * seconds]
    return f"a step takes {in_time(seconds)}: {', '.join(shown)}"


def _compiling(evidence: Evidence, lines: dict[int, Timeline]) -> Diagnosis | None:
    """Functions that are compiled again and again."""
    ranks = [
        rank
        for rank, line in lines.items()
        if (line.compiled[:, 0] > 0).mean() >= COMPILES and line.compiled[:, 1].sum() >= COMPILES_SHARE * line.total
    ]
    if not ranks:
        return None
    rank = max(ranks, key=lambda each: lines[each].compiled[:, 1].sum())
    line, alone = lines[rank], len(ranks) == 1
    steps = int((line.compiled[:, 0] > 0).sum())
    each = line.compiled[:, 1].sum() / steps
    who = evidence.who(rank) if alone else many(len(ranks), "rank")
    return Diagnosis(
        False, f"slow: {who} compiled anew in {steps} of the last {many(len(line.steps), 'step')}, for {in_time(each)} "
        f"in each of them, of a step of {in_time(line.seconds)}",
        [f"{many(int(line.compiled[:, 0].sum()), 'function')} were compiled there", usual_step(lines)],
        next="Something that the compiler takes for fixed changes from step to step, such as a shape: pad to few "
        "shapes, or torch.compile(dynamic=True). TORCH_LOGS=recompiles says what it was.",
        kind="slow", rank=rank if alone else None, host=evidence.host(rank) if alone else "", step=line.steps[-1] + 1,
    )  # fmt: skip


def _straggler(evidence: Evidence, lines: dict[int, Timeline]) -> Diagnosis | None:
    for rank, line in sorted(lines.items(), key=lambda each: -each[1].usual_busy):
        peers = [lines[other] for other in _peers(evidence, rank) if other in lines]
        if not peers:
            continue
        excess = line.usual_busy - median(peer.usual_busy for peer in peers)
        if excess < STRAGGLES_SECONDS or excess < STRAGGLES * line.seconds:
            return None
        phase, own, others = _most(line, peers, excess)
        starved = line.usual_queue - median(peer.usual_queue for peer in peers) > excess / 2
        words = [
            f"{evidence.who(rank)} takes {in_time(own)} for {phase} in a step, where others take {in_time(others)}",
            f"it computes for {in_time(line.usual_busy)} of a step and waits for {in_time(line.usual_wait)}; the "
            f"others wait for {in_time(median(peer.usual_wait for peer in peers))}",
            *_processor(line, peers, starved),
        ]
        late = lateness(evidence.flights, [rank, *(peer.rank for peer in peers)], line.steps)
        if rank in late:
            words.append(
                f"it was the last to come to {late[rank][1]:.0%} of their collectives, {in_time(late[rank][0])} late "
                "on average"
            )
        frame = evidence.line(rank)
        place = frame.place if frame else ""
        cause = ", for want of a processor" if starved else ""
        return Diagnosis(
            False, f"slow: {evidence.who(rank)} holds the others up, by {in_time(excess)} in a step of "
            f"{in_time(line.seconds)}, in {phase}{cause}{f': {place}' if place else ''}",
            [*words, usual_step(lines)],
            next=_advice(phase, evidence.host(rank), starved),
            kind="slow", rank=rank, host=evidence.host(rank), place=place, step=line.steps[-1] + 1,
        )  # fmt: skip
    return None


def _most(line: Timeline, peers: Sequence[Timeline], excess: float) -> tuple[str, float, float]:
    """The phase in which a rank takes most of that longer than others do; how long it and they take for it."""
    found = [(phase, line.usual(phase), median(peer.usual(phase) for peer in peers)) for phase in STEPS_OWN]
    most = max(found, key=lambda each: each[1] - each[2])
    if line.on_gpu and most[1] - most[2] < excess / 2:  # its host launches as quickly as others do
        return "computing on its GPU", line.usual_device, median(peer.usual_device for peer in peers)
    return most


def _processor(line: Timeline, peers: Sequence[Timeline], starved: bool) -> list[str]:
    """Whether a rank's host computed all that time, slept, or had no processor; nothing where that is not known."""
    had, queued = (float(np.median(line.processor[:, column])) for column in range(2))
    if had + queued <= 0 or line.on_gpu:
        return []
    if starved:
        others = median(peer.usual_queue for peer in peers)
        return [f"in each step it was ready for {in_time(queued)} without a processor, others for {in_time(others)}"]
    slept = line.usual_busy - had - queued
    if slept > line.usual_busy / 2:
        return [f"of what it took for itself, it slept or waited for a device or a file for {in_time(slept)} a step"]
    return [f"its main thread had a processor for {in_time(had)} a step"]


def _advice(phase: str, host: str, starved: bool) -> str:
    if starved:
        return f"Look at {host}: another process on its cores, a limit of CPU (cgroup), or more ranks than cores."
    if phase == "data":
        return "Read ahead with --set workers=4, or look at what that rank's samples are read from."
    if phase == "callbacks":
        return "Look at what callbacks do on that rank alone."
    return (
        f"Look at code of yours that does more, or sleeps, on that rank in {phase}: --profile 10:12 shows where its "
        f"time goes. Else at {host}: another job on it, heat, a slower device. Or the samples of that rank take longer."
    )


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
        False, f"slow: steps wait for data, {in_time(usual)} of {in_time(seconds)}",
        [f"{evidence.who(rank)} waits longest, {in_time(waits[rank])}", *_slept(lines[rank], usual), usual_step(lines)],
        next="Read ahead with --set workers=4, or with more of them, or make what data() returns quicker to read.",
        kind="slow", rank=rank, host=evidence.host(rank), place=frame.place if frame and reading else "",
    )  # fmt: skip


def _exposed_seconds(event: dict[str, Any]) -> float:
    """Of a step in which a rank did nothing but wait for messages, by its device's clock where that was read."""
    noted = [seconds for name, seconds in event.items() if name.startswith("exposed_")]
    return sum(noted) if noted else event["seconds"].get("reduce", 0.0) + event["seconds"].get("wait", 0.0)


def _slept(line: Timeline, waits: float) -> list[str]:
    """Whether reading computes, or waits for something itself; nothing where that is not known."""
    had = float(np.median(line.processor[:, 0]))
    if had <= 0 or line.on_gpu or line.seconds - had < waits / 2:
        return []
    return ["it has no processor meanwhile: what it reads is waited for, or it sleeps"]


def _exposed(evidence: Evidence, lines: dict[int, Timeline]) -> Diagnosis | None:
    usual = median(line.usual_wait for line in lines.values())
    seconds = median(line.seconds for line in lines.values())
    starved = median(line.starved for line in lines.values()) >= STARVED
    taken = transfers(evidence.flights, lines)
    if starved:
        taken = {group: spent for group, spent in taken.items() if len(_hosts(evidence, group)) > 1}
    slowest = max(taken, key=lambda group: taken[group], default="")
    if slowest and taken[slowest] >= max(EXPOSED_SECONDS, EXPOSED * seconds):
        return _link(evidence, lines, taken, slowest)
    if any(line.on_gpu for line in lines.values()):  # by its own clock
        usual = median([_exposed_seconds(event) for event in evidence.events("step")][-LAST_STEPS:] or [0.0])
    if usual < EXPOSED_SECONDS or usual < EXPOSED * seconds or starved:
        return None
    axes = {row.axis for flight in evidence.flights.values() for row in flight.groups.values()}
    staged = any(axis.startswith("pp") for axis in axes)
    return Diagnosis(
        False, f"slow: ranks wait for messages of each other, {in_time(usual)} of a step of {in_time(seconds)}",
        [usual_step(lines)],
        next="Stages of a pipeline wait less with more micro-batches a step (micro_batch=), or with schedule=zb."
        if staged
        else "Larger micro-batches send less often; phalanx doctor measures how fast ranks reach each other.",
        kind="slow",
    )  # fmt: skip


def _link(evidence: Evidence, lines: dict[int, Timeline], taken: dict[str, float], group: str) -> Diagnosis:
    """Messages along one axis take most of a step; between which hosts they travel."""
    flights = {rank: evidence.flights[rank] for rank in lines if group in evidence.flights[rank].groups}
    axis, seconds = next(iter(flights.values())).groups[group].axis, median(line.seconds for line in lines.values())
    hosts = _hosts(evidence, group)
    where = f"between {listed(hosts, SHOWN)}" if len(hosts) > 1 else f"among ranks of {hosts[0]}"
    words = [f"of rank{'s' if len(flights) > 1 else ''} {listed([str(rank) for rank in flights], SHOWN)}"]
    sent = [event.get("sent", {}).get(axis, 0) for event in evidence.events("step")][-LAST_STEPS:]
    if 0 in flights and sent and median(sent):
        rate = in_bytes(median(sent) / taken[group])
        words.append(f"rank 0 sends {in_bytes(median(sent))} in a step along {axis}: {rate} a second")
    others = {
        row.axis: max(taken[name] for name, each in flight.groups.items() if name in taken and each.axis == row.axis)
        for flight in flights.values()
        for row in flight.groups.values()
        if row.axis != axis and row.name in taken
    }
    words += [f"along {name} they take {in_time(spent)}" for name, spent in others.items()]
    return Diagnosis(
        False, f"slow: communication along {axis} is not hidden, {in_time(taken[group])} of a step of "
        f"{in_time(seconds)}, {where}",
        [*words, usual_step(lines)],
        next=f"Look at the network {where}: phalanx doctor measures how fast ranks reach each other. Larger "
        "micro-batches send less often.",
        kind="slow", axis=axis, host=hosts[0] if len(hosts) == 1 else "", step=next(iter(lines.values())).steps[-1] + 1,
    )  # fmt: skip


def _hosts(evidence: Evidence, group: str) -> list[str]:
    """Those of a group's ranks."""
    return list(dict.fromkeys(flight.host for flight in evidence.flights.values() if group in flight.groups))


def crowded(lines: dict[int, Timeline]) -> list[str]:
    """That ranks had to wait for processors, where they had to for long."""
    queued = median(line.usual_queue for line in lines.values())
    if queued < EXPOSED_SECONDS or median(line.starved for line in lines.values()) < STARVED:
        return []
    return [f"ranks were ready for {in_time(queued)} of a step without a processor: other processes, or too few cores"]


def _stalled(evidence: Evidence) -> Diagnosis | None:
    """Steps stood still until files were written, by what rank 0 noted since ranks began."""
    passed, until, pauses = 0.0, 0.0, list[dict[str, Any]]()
    for event in evidence.events("start", "step", "pause"):
        if event["kind"] == "start":
            passed, until, pauses = 0.0, event["time"], []
        elif event["kind"] == "pause" and event["on"] == "checkpoint" and not event["last"]:
            pauses.append(event)
        passed, until = passed + max(0.0, event["time"] - until), event["time"]  # a clock may be set back
    lost = sum(event["seconds"] for event in pauses)
    if lost < STALLED_SECONDS or lost < STALLED * passed:
        return None
    longest = max(pauses, key=lambda event: event["seconds"])
    return Diagnosis(
        False, f"slow: steps stood still for checkpoints, {in_time(lost)} of {in_time(passed)}: "
        f"{many(len(pauses), 'time')}, the longest after step {longest['step']} for {in_time(longest['seconds'])}",
        [f"they are kept in {longest['where']}"],
        next="Look at that store: what is written behind the steps was not done when the next checkpoint was due. Save "
        "less often (--save-steps, --save-minutes), or elsewhere (--checkpoints).",
        kind="slow", step=longest["step"],
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
                False, f"slow: {share:.0%} of the last steps' time went to {phase}, {in_time(spent)}",
                [usual_step(lines)], next=remedy, kind="slow",
            )  # fmt: skip
    return None
