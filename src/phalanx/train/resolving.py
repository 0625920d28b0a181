"""From the words of a user, over those of a ``run.toml`` if one is given, to a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from phalanx.cluster import Cluster
from phalanx.data.adopted import training_samples
from phalanx.data.planned import training_order
from phalanx.errors import WrongUse, closest
from phalanx.layout import Layout
from phalanx.references import find_task
from phalanx.run import read_settings
from phalanx.settings import make_task, over, parse_assignments, plain_settings, unwritten
from phalanx.task import Task
from phalanx.train.job import Job
from phalanx.train.options import Options
from phalanx.train.placing import fitted, hosts_used, place, ranks_of
from phalanx.train.trusted import task_of
from phalanx.words import many

TEXTS = ("task", "layout", "on", "device", "folder")
"""What a ``run.toml`` says of a run beside its options."""


def resolve(
    *,
    task: str | None,
    layout: str | None,
    on: str | None,
    assignments: Sequence[str],
    steps: int | None,
    epochs: float | None = None,
    config: Path | None,
    device: str | None,
    resume: bool = False,
    exact: bool = False,
    trust: bool | None = None,
    **options: Any,
) -> Job:
    """The job that a command line asks for."""
    torch.set_num_threads(1)  # a task file may compute while it is imported, and no thread may survive into a fork
    saved = _saved(config, resume) if config else {}
    ran: Mapping[str, Any] = saved.get("run", {})
    reference = task or ran.get("task")
    if reference is None:
        raise WrongUse("there is no task to train. Name one: phalanx train gpt, or phalanx train file.py")
    kind = find_task(reference) if task is not None or config is None else task_of(config, ran, bool(trust))
    short = {name: value for name, value in (("steps", steps), ("epochs", epochs)) if value is not None}
    values = over(saved.get("settings", {}), parse_assignments(assignments) | short)
    made = make_task(kind, values)
    plan_steps(made)
    for note in _unsaid(made, values, config, resume) if config else ():
        print(f"   note  {note}")
    if on is not None:  # where a run goes on has its own number of hosts
        ran = {name: value for name, value in ran.items() if name not in ("min_nodes", "max_nodes", "meet")}
    settled = Options.resolve(options, ran)
    return job_of(reference, made, layout, on, device, settled, ran=ran, resume=resume, exact=exact)


def job_of(
    reference: str, task: Task, layout: str | None, on: str | None, device: str | None, options: Options,
    *, ran: Mapping[str, Any] | None = None, resume: bool = False, exact: bool = False,
) -> Job:  # fmt: skip
    """A task, spread and placed; ``ran``: what a run that is repeated says of itself."""
    ran = ran or {}
    chosen, ranks = _place(layout, on, task, ran, options, resume)
    chosen = _exactly(chosen, ran, task) if exact else chosen
    _check_ranks(chosen, ranks, task, options)
    if (profiled := options.profiled()) is not None:
        profiled.check(ranks * options.max_nodes, task.steps)
    return Job(reference, task, chosen, Cluster.here(ranks, device or ran.get("device")), options)


def _saved(config: Path, resume: bool) -> Mapping[str, Any]:
    """What a ``run.toml`` says; what it cannot mean is refused."""
    saved = read_settings(config)
    ran: Mapping[str, Any] = saved.get("run", {})
    known = (*TEXTS, *(field.name for field in fields(Options)))
    wrong = [("table", name) for name in saved if name not in ("run", "settings")]
    wrong += [("key", name) for name in ran if name not in known]
    for what, name in wrong:
        raise WrongUse(f"{config} has a {what} {name!r} that means nothing; {closest(name, known)}")
    for name in TEXTS:
        if not isinstance(ran.get(name, ""), str):
            raise WrongUse(f"{name} = {ran[name]!r} in {config} is not text. Mend that line.")
    if not ran.get("task") and (resume or not saved):
        raise WrongUse(
            f"{config} names no task: it is empty, or was cut short. Put back a copy of it, or remove it and give "
            "the task and all its settings again."
        )
    return saved


def plan_steps(task: Task) -> None:
    """Set ``task.steps`` to the number of steps of its epochs, where it asks for epochs."""
    if task.epochs:
        order = training_order(task, training_samples(task))
        task.plan_steps(order.size, order.steps_in)


def _unsaid(task: Task, values: Mapping[str, Any], config: Path, resume: bool) -> Iterator[str]:
    """Settings that are not in a ``run.toml``, a line each."""
    for name, value in plain_settings(task).items() if resume else ():
        if name not in values and not (name == "steps" and task.epochs):  # which follow from these
            yield f"{config} does not say what {name} is: it is {value} now"
    for name in unwritten(task):
        if name not in values:
            yield f"{config} cannot say what {name} is: it is as in the code"


def _place(
    layout: str | None, on: str | None, task: Task, ran: Mapping[str, Any], options: Options, resume: bool
) -> tuple[Layout, int]:
    """The layout, and the number of ranks on each host."""
    if resume and on and not layout and "layout" in ran:  # the same on another number of ranks: as close as can be
        world, before = ranks_of(on) * options.max_nodes, Layout.parse(ran["layout"])
        layout = str(fitted(before, task.global_batch, world))
        if layout != str(before):
            on_them = f"is {layout} on {many(world, 'rank')}"
            print(f"   note  the layout was {before} and {on_them}; --layout chooses another")
    return place(
        layout or (None if on else ran.get("layout")), on or (None if layout else ran.get("on")), options.max_nodes
    )


def _exactly(layout: Layout, ran: Mapping[str, Any], task: Task) -> Layout:
    """With sums as exact as those of the run that goes on."""
    before = Layout.parse(ran["layout"]).exact if "layout" in ran else 0
    return replace(layout, exact=layout.exact or before).exactly(task.global_batch)


def _check_ranks(layout: Layout, ranks: int, task: Task, options: Options) -> None:
    """Refuse a layout that so many ranks do not make, and a drill that would kill nobody."""
    world = ranks * options.max_nodes
    if options.meet is None or not hosts_used(layout, task.global_batch, [ranks] * options.max_nodes):
        layout.check(task.global_batch, world)
    drill = options.drill()
    if drill and not (drill[0] < world and 0 < drill[1] <= task.steps):
        raise WrongUse(
            f"--kill {options.kill} would kill nobody: there are ranks 0 to {world - 1} and {task.steps} steps. "
            "Choose a rank and a step of those."
        )
