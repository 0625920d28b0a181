"""How a run ended, told: trained, stopped, failed, or not done; what is saved and what is lost."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

from phalanx.checkpoint.manager import CheckpointManager
from phalanx.checkpoint.manifest import Damaged
from phalanx.events import say
from phalanx.files import write_whole
from phalanx.launch.local import Failure, HostOutcome
from phalanx.launch.supervisor import Supervisor
from phalanx.run import Run
from phalanx.task import Task
from phalanx.train.answering import answers_path
from phalanx.train.certificate import NotDone, certified
from phalanx.train.less_sent import less_sent
from phalanx.train.summary import Summary
from phalanx.train.utilisation import used
from phalanx.verdict import Verdict
from phalanx.watch.chart import chart, shows
from phalanx.watch.page.report import write_report
from phalanx.watch.why import why
from phalanx.words import many, sparkline

ENOUGH = 50
"""Steps that a chart of the loss is worth its lines for."""


def conclude(supervisor: Supervisor, outcome: HostOutcome, task: Task, run: Run, manager: CheckpointManager) -> Verdict:
    """The verdict on what the ranks of this host, and those of others, came to."""
    private = supervisor.shared is not None and supervisor.shared.private
    if not supervisor.leads and not outcome.failures and (outcome.finished or not outcome.interrupted):
        if run.certified_plan() != task.steps and not private and not supervisor.spare:
            return not_done(run, NotDone("there is no certificate"))
        return Verdict(True, f"done: the first host says what came of it, in {run.path}")
    verdict = _verdict(supervisor, outcome, task, run, manager)
    leave_report(run, verdict)
    if supervisor.recoveries:
        times = "once" if supervisor.recoveries == 1 else f"{supervisor.recoveries} times"
        verdict.evidence.append(f"ranks were started again {times}")
    return verdict


def leave_report(run: Run, verdict: Verdict) -> None:
    """Beside what came of it its pictures, if there is anything to see; the run does not hang on them."""
    try:
        if run.last_step() is not None:
            verdict.evidence.append(f"report: {write_report(run)}")
    except Exception as error:
        say(f"   note  no report.html was written: {error}")


def _verdict(supervisor: Supervisor, outcome: HostOutcome, task: Task, run: Run, manager: CheckpointManager) -> Verdict:
    if outcome.interrupted and not outcome.finished:
        if supervisor.rendezvous is not None:
            return left(run, manager, supervisor.done())
        return stopped(run, manager, outcome.failures or [], supervisor.stop.cut_short, supervisor.done())
    if outcome.failures:
        return failed(run, manager, outcome.failures)
    if outcome.result is None:
        return Verdict(False, "a rank left before the end, by sys.exit perhaps", next="Take that out of the task.")
    try:
        return trained(run, manager, task, outcome.result, certified(run, task, manager))
    except (NotDone, Damaged) as reason:
        return not_done(run, reason)


def trained(run: Run, manager: CheckpointManager, task: Task, summary: Summary, certainty: str) -> Verdict:
    """It came to its end."""
    steps = run.ledger().values()
    losses: dict[str, list[float]] = {}
    """By turn, since one's say nothing of another's."""
    for event in steps:
        if event["kind"] == "step":
            losses.setdefault(event.get("turn") or "loss", []).append(float(event["loss"]))
    skipped = sum(event["skipped"] for event in steps)
    evidence = [line for name, own in losses.items() for line in _drawn(name, own)]
    if summary.held_out:
        of = f", with the weights of {summary.held_out_with}" if summary.held_out_with else ""
        found = ", ".join(f"{name} {value:.4f}" for name, value in summary.held_out.items())
        evidence.append(f"held out{of}: {found}")
    if skipped:
        were = "was" if skipped == 1 else "were"
        evidence.append(
            f"{many(skipped, 'step')} {were} skipped: a number was bad, or nothing counted; the events say which"
        )
    evidence += [*less_sent(run), *used(run), certainty, f"weights: {run.weights_path}"]
    if (answers := answers_path(run, summary.steps)).is_file():
        evidence.append(f"answers: {answers}")
    layout = manager.open(summary.steps).manifest.facts["layout"]
    of, why = (f" of the {task.steps} planned", f": {summary.ended.why}") if summary.ended else ("", "")
    told = f"trained {type(task).__name__} for {many(summary.steps, 'step')}{of} on {layout}{why}"
    return Verdict(True, told, evidence)


def _drawn(name: str, values: list[float]) -> list[str]:
    """How a loss went: in a line, or a chart where there is enough of it."""
    encoding = getattr(sys.stdout, "encoding", None)
    if len(values) < ENOUGH:
        bars = sparkline(values)
        return [f"{name} {values[0]:.4f} {bars if shows(bars, encoding) else 'to'} {values[-1]:.4f}"]
    return [f"{name} {values[0]:.4f} to {values[-1]:.4f}", *chart(values, encoding=encoding)]


def stopped(run: Run, manager: CheckpointManager, failures: Sequence[Failure], cut_short: str, done: int) -> Verdict:
    """Somebody asked for it to end. ``done``: steps of any rank, of which the last may not have been noted."""
    saved, lost = _saved(run, manager, done)
    why = f" {cut_short}" if cut_short else ""
    evidence = [f"rank {failure.rank}: {failure.reason}" for failure in failures if not failure.secondary and lost]
    return Verdict(
        False, f"stopped{why}: every rank has ended, {saved}", [*evidence, f"what it did is in {run.path}"],
        next=f"Go on with phalanx train --resume --run {run.in_shell}", code=130,
    )  # fmt: skip


def left(run: Run, manager: CheckpointManager, done: int) -> Verdict:
    """One host of several was asked to end."""
    saved, _ = _saved(run, manager, done)
    return Verdict(
        False, f"this host has left the run ({saved}); the others go on if they are enough", [],
        next="Start the same command here again to join them.", code=130,
    )  # fmt: skip


def _saved(run: Run, manager: CheckpointManager, done: int) -> tuple[str, int]:
    """In words what is saved and what is lost, and how many steps that is."""
    done = max(done, max(run.ledger(), default=-1) + 1)
    saved = max(manager.steps(), default=0)
    lost = max(0, done - saved)
    if not saved:
        return (f"nothing was saved, {many(lost, 'step')} lost" if lost else "nothing was saved yet"), lost
    return f"saved up to step {saved}" + (f", {many(lost, 'step')} after it lost" if lost else ""), lost


def not_done(run: Run, reason: Exception) -> Verdict:
    """Its ranks ended well, and what they left does not show that all is done."""
    advice = getattr(reason, "advice", "") or f"Go on with phalanx train --resume --run {run.in_shell}"
    return Verdict(False, f"not done: {reason}", next=advice)


def _cause(run: Run, first: Failure) -> str:
    """In the words of `phalanx why`, where who failed first may only have waited for another; "": it is not known."""
    if not (first.stuck or first.secondary):
        return ""
    try:
        found = why(run, live="")
    except Exception as error:  # what was seen of the failure must do
        say(f"   note  phalanx why {run.path} fails: {error}")
        return ""
    return found.summary if found.kind in ("stuck", "desynchronised", "deadlock", "network") else ""


def failed(run: Run, manager: CheckpointManager, failures: Sequence[Failure]) -> Verdict:
    """A rank failed, the first of them first, and starting again does not help."""
    first, *others = failures
    if first.code != 1:
        return Verdict(False, f"phalanx: {first.reason}", code=first.code)
    evidence = [first.trace.rstrip()] if first.trace and not first.final else []
    evidence += [f"the whole traceback is in {first.file}"] if first.file else []
    evidence += [f"rank {failure.rank}: {failure.reason}" for failure in others]
    saved = max(manager.steps(), default=0)
    told = f"rank {first.rank} failed first: {first.reason}"
    if cause := _cause(run, first):
        told, evidence = cause, [told, *evidence]
    verdict = Verdict(
        False,
        told,
        evidence,
        next=(f"phalanx why {run.in_shell} says more. " if first.stuck or first.secondary else "")
        + f"The job has ended and no rank is left. Mend the cause, then phalanx train --resume --run {run.in_shell} "
        + (f"goes on after step {saved}." if saved else "begins at step 0: nothing was saved."),
    )
    with suppress(OSError):  # where the disk is full, what is on the screen must do
        write_whole(run.path / "verdict.json", verdict.to_json() + "\n")
    return verdict
