"""The certificate of a finished run: every planned step done, every sample seen as planned, and what came of it."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from phalanx.checkpoint.manager import CheckpointManager
from phalanx.data.adopted import training_samples
from phalanx.data.order import Order, digest
from phalanx.data.planned import order_of, training_order
from phalanx.files import when_there_is_room, write_whole
from phalanx.folder_files import make_folder
from phalanx.layout import Layout
from phalanx.run import Run, counted
from phalanx.task import Task
from phalanx.train.calling import Ended
from phalanx.words import listed, many

CHECKED = 1000
"""So many steps' samples are worked out again."""
Ledger = dict[int, dict[str, Any]]
"""Events, by the step that they are of."""
SHOWN = 3
"""So many changes are told in the one line."""


class NotDone(Exception):
    """The run's events do not show that it is done; the ``advice`` is what to do, where going on is not enough."""

    def __init__(self, reason: str, advice: str = "") -> None:
        super().__init__(reason)
        self.advice = advice


def _whole_ledger(run: Run, steps: range) -> tuple[Ledger, Ledger]:
    """Rank 0's, and what a host that lost power may have lost of it from others': one a host notes the same.

    Besides, by its last step, what all sites did together between two times that they agreed: all ranks note that.
    """
    ledger, rounds = run.ledger(), _rounds(run, 0)
    others = (int(path.stem.removeprefix("rank-")) for path in sorted(run.events_path(0).parent.glob("rank-*.jsonl")))
    for rank in others:
        if all(step in ledger for step in steps):
            break
        ledger = {**run.ledger(rank), **ledger}
        rounds = {**_rounds(run, rank), **rounds}
    return ledger, rounds


def _rounds(run: Run, rank: int) -> Ledger:
    return counted(run.events(rank, "start", "rollback", "round"), rounds=True)


def _judged_by(ledger: Ledger, rounds: Ledger, starts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Whose numbers are those of all ranks, in order: steps, and with sites their rounds, as a step of rank 0 is its
    site's alone."""
    done = {step: event for step, event in ledger.items() if event["kind"] == "step"}
    alone = [(start["step"], _sites(start) is not None) for start in starts]
    if not any(sites for _, sites in alone):
        return list(done.values())

    def own(step: int) -> bool:
        return next((sites for first, sites in reversed(alone) if first <= step), False)

    if ledger and own(last := max(ledger)) and last not in rounds:
        raise NotDone(f"what all sites did up to step {last + 1} is not in the run's events")
    found = {step: event for step, event in done.items() if not own(step)}
    for step, event in rounds.items():
        if own(step):
            bad = (event["bad"] or "bad numbers in its last step") if event["ended_badly"] else ""
            found[step] = {**event, "skipped": not event["count"], "bad": bad}
    return [found[step] for step in sorted(found)]


def _sites(start: Mapping[str, Any]) -> str | None:
    """How sites trained by themselves from a start on, if they did."""
    layout = Layout.parse(start["layout"]) if "layout" in start else None
    return None if layout is None or layout.local is None else f"dp={layout.dp},comm={layout.comm}"


def _again(run: Run) -> Iterator[float | None]:
    """By how much the loss differed each time a step was done again, which must be on the same samples.

    None: that says nothing, as other code, or other sites, have other losses of the same samples.
    """
    before: Ledger = {}
    sites: str | None = None
    for event in run.events(0, "start", "step"):
        if event["kind"] == "start":
            were, sites = sites, _sites(event)
            if event.get("other_samples"):  # another run from there on, which was allowed
                before = {}
            elif event.get("changes") or sites != were:
                before = {step: {"samples": known["samples"]} for step, known in before.items()}
            continue
        known = before.get(event["step"])
        if known is not None and known["samples"] != event["samples"]:
            raise NotDone(f"step {event['step'] + 1} trained on other samples when it was done again")
        if known is not None and "loss" in known:
            off = 0.0 if known["loss"] == event["loss"] else abs(float(known["loss"]) - float(event["loss"]))
            yield off if math.isfinite(off) else math.inf  # once it was no number
        elif known is not None:
            yield None
        before[event["step"]] = event


def _check_numbers(run: Run, task: Task, steps: list[dict[str, Any]]) -> None:
    """Refuse weights that no good step speaks for: the last one that could be judged must not have been bad."""
    if steps and all(event["skipped"] for event in steps):
        raise NotDone(
            f"{type(task).__name__} learned nothing: every step was skipped",
            "Look at the first step's loss: is a target out of range, a log of 0, an input not finite?",
        )
    judged = [event for event in steps if not event["skipped"] or event.get("bad")]  # else an overflow, or no terms
    bad = list(itertools.takewhile(lambda event: event.get("bad"), reversed(judged)))
    if bad:
        before = f", and those of {len(bad) - 1} before it" if len(bad) > 1 else ""
        raise NotDone(
            f"the update of step {bad[0]['step'] + 1} was left out ({bad[0]['bad']}){before}, and no good step came "
            "after: nothing shows that the weights are any good",
            "Look at that step's samples in the run's events, or lower the learning rate; one step more would show: "
            f"phalanx train --resume --run {run.in_shell} --steps {task.steps + 1}",
        )


def certify(run: Run, task: Task, manager: CheckpointManager) -> dict[str, Any]:
    """Read it off the run's events and its last checkpoint, and write it down."""
    starts = list(run.events(0, "start"))
    taken_up = int(starts[0]["step"]) if starts else 0  # by another folder's run, for whose steps its checkpoint speaks
    ended = _ended(task, manager)
    last = task.steps if ended is None else ended.step
    steps = range(taken_up, last)
    ledger, rounds = _whole_ledger(run, steps)
    missing = [step for step in steps if step not in ledger]
    if missing:
        raise NotDone(f"{len(missing)} of {last} planned steps were not done, step {missing[0] + 1} among them")
    orders = [(start["step"], _order(start, task)) for start in starts]

    def order(step: int) -> Order:
        """As the last of those that did this step, or one before it, planned it."""
        return next((known for first, known in reversed(orders) if first <= step), orders[-1][1])

    for step in steps[:: max(1, last // CHECKED)]:
        if ledger[step]["samples"] != digest(order(step).ids(step)):
            raise NotDone(f"step {step + 1} trained on other samples than those planned for it")
    judged = _judged_by({step: ledger[step] for step in steps}, rounds, starts)
    _check_numbers(run, task, judged)
    if last not in manager.steps():
        raise NotDone(f"the state after step {last} was not saved")
    best = _best(run)
    manifest = manager.open(last).manifest
    weights = manifest if best is None else manager.open(best["step"]).manifest
    again = list(_again(run))
    differences = [off for off in again if off is not None]
    found = {
        "task": type(task).__name__,
        "finished": _when(ledger[steps[-1]]) if steps else None,
        "loss": judged[-1]["loss"] if judged else None,
        "held_out": next((event["held_out"] for event in reversed(list(run.events(0, "evaluation")))), None),
        "steps": last,
        "planned": task.steps,
        "ended": None if ended is None else ended.why,
        "taken_up": taken_up,
        "samples": sum(order(step).slots(step) for step in range(last)),
        "epoch": orders[-1][1].describe() if orders and not orders[-1][1].visits_all else "",
        "changes": _changes(starts),
        "best": best,
        "hash": weights.hash(),
        "state": manifest.hash(""),
        "layout": manifest.facts["layout"],
        "code": manifest.facts["code"],
        "generations": len(starts),
        "repeated": len(again),
        "compared": len(differences),
        "difference": None if math.inf in differences else max(differences, default=0.0),
        "bad_samples": sorted(_bad_samples(run)),
        "skipped": [event["step"] for event in judged if event["kind"] == "step" and event["skipped"]],
        "skipped_by_sites": sum(event["skipped"] for event in rounds.values()),
        "left_out": [step for step, event in ledger.items() if event["kind"] == "left out"],
        "unchecked": next((str(event["left_out"]) for event in reversed(list(run.events(0, "check")))), ""),
    }
    make_folder(run.path, run.certificate_path.parent)
    text = json.dumps(found, indent=1) + "\n"
    when_there_is_room(run.certificate_path, lambda: write_whole(run.certificate_path, text, within=run.path))
    return found


def _best(run: Run) -> dict[str, Any] | None:
    """The checkpoint whose weights were left, by a measure; None: the last step's were."""
    ends = list(run.events(0, "end"))
    return ends[-1].get("best") if ends else None


def _bad_samples(run: Run) -> set[int]:
    """Those that a rank could not read, and left out."""
    ranks = (int(path.stem.removeprefix("rank-")) for path in run.events_path(0).parent.glob("rank-*.jsonl"))
    return {event["sample"] for rank in ranks for event in run.events(rank, "bad sample")}


def _ended(task: Task, manager: CheckpointManager) -> Ended | None:
    """Where and why a callback has ended the run, by its newest state, if one has and no more steps are planned now."""
    newest = max(manager.steps(), default=0)
    found = Ended.found(manager.open(newest).manifest.facts, task.steps) if newest else None
    return found if found is not None and found.step == newest < task.steps else None


def _when(event: Mapping[str, Any]) -> str:
    return datetime.fromtimestamp(event["time"], UTC).isoformat(timespec="seconds")


def _order(start: Mapping[str, Any], task: Task) -> Order:
    size, batch, seed = start["data"], start.get("global_batch", task.global_batch), start.get("seed", task.seed)
    found = order_of(start.get("order"), size, batch, seed, lambda: training_order(task, training_samples(task)))
    if found is None:
        raise NotDone(
            "samples have other lengths, weights or classes now than when it was trained, so that it cannot be seen "
            "which were planned",
            "Make the data what it was, and give --resume.",
        )
    return found


def _changes(starts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What was changed between attempts, and before which step."""
    told = ("step", "changes", "other_samples")
    found = [{name: start[name] for name in told} for start in starts if start.get("changes")]
    return [change for number, change in enumerate(found) if change not in found[:number]]


def certified(run: Run, task: Task, manager: CheckpointManager) -> str:
    """What is certain about a run that is done, in one line; it is written down."""
    return in_words(certify(run, task, manager))


def in_words(found: Mapping[str, Any]) -> str:
    """A certificate in one line."""
    again = ""
    if found["repeated"]:
        again = f"; {found['repeated']} done again after failures"
        off, compared = found["difference"], found.get("compared", found["repeated"])
        same = "but for some that was not finite" if off is None else f"up to {off:.1e}" if off else "to the last bit"
        if compared:
            again += f",{f' {compared} of them' * (compared < found['repeated'])} with the same loss {same}"
    if found["taken_up"]:
        again += f"; of the first {found['taken_up']} steps the checkpoint alone is known"
    changes = found.get("changes", ())
    for change in changes[:SHOWN]:
        again += f"; after step {change['step']}: {listed(change['changes'], SHOWN)}"
    if len(changes) > SHOWN:
        again += f"; {many(len(changes) - SHOWN, 'more change')} in certificate.json"
    if found.get("unchecked"):
        again += f"; the task was not checked ({found['unchecked']})"
    left = f", {len(found['left_out'])} steps' data left out" if found["left_out"] else ""
    others = any(change["other_samples"] for change in found.get("changes", ()))
    sure = "some perhaps twice and some never" if others else "none lost and none counted twice"
    bad = found.get("bad_samples")
    lost = f", {many(len(bad), 'sample')} that cannot be read left out" if bad else ""
    epoch = f"; {found['epoch']}" if found.get("epoch") else ""
    samples = f"{found['samples']:,} samples, {sure}{lost}{epoch}"
    early = f" of {found['planned']} planned, ended by the task ({found['ended']})" if found.get("ended") else ""
    best = found.get("best")
    which = f" of step {best['step']}, whose {best['measure']} of {best['value']:.6g} is the best" if best else ""
    return f"certificate: {found['steps']} steps{early}, {samples}{left}{again}; weights {found['hash'][:16]}{which}"
