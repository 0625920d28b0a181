"""What is wrong with a run's numbers: losses that are not finite, spikes, replicas that disagree."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any

from phalanx.run import counted
from phalanx.watch.diagnosis import Diagnosis
from phalanx.words import listed, many

KNOWN, LEAST = 64, 16
"""How many of the last losses one is held against, and how many there must be."""
SPIKE, DEVIATIONS = 3.0, 20.0
"""A loss is a spike if it is so many times the median of those, and so many of their usual deviations from it."""
OF_FIRST = 0.1
"""And if it is so much of what losses were at first: those of a task that is learned by heart jump close to zero."""
SHOWN = 8


Events = list[dict[str, Any]]


def wrong(events: Events) -> Diagnosis | None:
    """The gravest, if any, by what rank 0 noted."""
    return _corrupted(events) or _bad(events) or _spike(events) or _dead(events)


def _corrupted(events: Events) -> Diagnosis | None:
    found = [event for event in events if event["kind"] == "corrupted"]
    if not found:
        return None
    last = found[-1]
    replays = [event for event in events if event["kind"] == "replay" and event["time"] > last["time"]]
    evidence = [f"found after step {event['step']}: {event['reason']}" for event in found]
    named = [rank for event in replays for rank in event["ranks"]] or last["ranks"]
    if replays:
        computed = listed([str(rank) for rank in replays[-1]["ranks"]], SHOWN)
        evidence.append(
            f"computed again from the same weights, rank {computed} came to other bits: its device is bad"
            if computed
            else "computed again from the same weights, all ranks came to the same bits: the fault has passed"
        )
    return Diagnosis(
        False, f"wrong: {last['reason']}", evidence,
        next="Look for code of yours that changes weights, or trains, on some ranks alone. If there is none, take the "
        "host of that rank out. Go on with --resume: what was saved since is put aside.",
        kind="wrong", rank=named[0] if len(named) == 1 else None, step=last["step"],
    )  # fmt: skip


def _bad(events: Events) -> Diagnosis | None:
    found = [event for event in events if event["kind"] == "bad"]
    if not found:
        return None
    first, last = found[0], found[-1]
    samples = listed([str(each) for each in first.get("sample_ids", [])], SHOWN)
    evidence = list(first.get("found", []))
    evidence += [f"its samples were {samples}"] if samples else []
    if len(found) > 1:
        evidence.append(f"{many(len(found), 'step')} were bad, the last was step {last['step'] + 1}: {last['reason']}")
    action = {"skip": "its update was left out", "rollback": "the run went back to the state it had kept"}
    evidence += [words for name, words in action.items() if first.get("action") == name]
    where, rank = first.get("where", ""), first.get("rank")
    return Diagnosis(
        False, f"wrong: in step {first['step'] + 1} {first['reason']}" + (f": {where}" if where else ""), evidence,
        next=f"Look at what {first['module']} computes there." if first.get("module")
        else "Look at those samples, lower the learning rate, or clip the gradient.",
        kind="wrong", rank=rank, step=first["step"] + 1, place=first.get("module") or "",
    )  # fmt: skip


def _dead(events: Events) -> Diagnosis | None:
    """Weights whose gradients were all zero until the end."""
    found = [event for event in events if event["kind"] == "dead gradients"][-1:]
    if not found or not found[0]["weights"]:
        return None
    last, names = found[0], [str(name) for name in found[0]["weights"]]
    return Diagnosis(
        False, f"wrong: {listed(names, SHOWN)} {'has' if len(names) == 1 else 'have'} had no gradient but zeros in the "
        f"{many(last['steps'], 'step')} up to step {last['step']}",
        [f"{many(len(names), 'weight')} of {last['of']} that are trained learn nothing"],
        next="Look at what multiplies their output by zero, cuts it off (clamp, a dead ReLU), or does not use it. If "
        "that is meant to be, freeze them.",
        kind="wrong", step=last["step"], place=names[0],
    )  # fmt: skip


def _spike(events: Events) -> Diagnosis | None:
    """The highest, where losses are held against those before them; by turn, where parts are trained in turn."""
    last: dict[str, deque[float]] = {}
    first: dict[str, float] = {}
    found: list[tuple[float, dict[str, Any], float]] = []
    for event in counted(events).values():
        loss = _number(event.get("loss"))
        if not math.isfinite(loss):
            continue
        turn = event.get("turn") or ""
        before = last.setdefault(turn, deque(maxlen=KNOWN))
        if len(before) >= LEAST:
            usual = median(before)
            least = OF_FIRST * first.setdefault(turn, usual)
            deviation = median(abs(each - usual) for each in before)
            if loss > max(SPIKE * usual, least) and usual > 0 and loss - usual > DEVIATIONS * deviation:
                found.append((loss / usual, event, usual))
        before.append(loss)
    if not found:
        return None
    times, event, usual = max(found, key=lambda each: each[0])
    count = f"{many(len(found), 'step')} had such a loss" if len(found) > 1 else "no other step had such a loss"
    return Diagnosis(
        False, f"wrong: the loss of step {event['step'] + 1} is {event['loss']:.4g}, {times:.1f} times the median of "
        f"those before it, {usual:.4g}",
        [count, f"its gradient's norm was {_number(event.get('grad_norm')):.4g}, its learning rate {event.get('lr')}"],
        next=f"--spike {SPIKE:g} leaves such steps out, --bad rollback goes back before them; or lower the rate.",
        kind="wrong", step=event["step"] + 1,
    )  # fmt: skip


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
