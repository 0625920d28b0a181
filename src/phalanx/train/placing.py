"""Which layout on how many ranks: from the command line's words, and again when the number of ranks has changed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate

from phalanx.errors import WrongUse
from phalanx.layout import DEGREES, Layout
from phalanx.parallel.weights.blueprint import Blueprint
from phalanx.parallel.weights.placement import Placement
from phalanx.task import Task
from phalanx.words import digits


def fitted(layout: Layout, global_batch: int, world: int, task: Task | None = None) -> Layout:
    """The closest layout for so many ranks, which the task's model, if it is given, can be cut by."""
    options = layout.fitted(global_batch, world)
    if not options:
        raise WrongUse(
            f"no layout near {layout} works on {world} ranks with global_batch={global_batch}. Give --layout."
        )
    if task is None:
        return options[0]
    model = Blueprint(task.model, task.seed).model
    anatomy = task.anatomy(model)
    for option in options:
        with suppress(WrongUse):
            Placement.of(model, anatomy, option)
            return option
    raise WrongUse(f"the model cannot be cut by any layout near {layout} on {world} ranks. Give --layout.")


def hosts_used(layout: Layout, global_batch: int, ranks: Sequence[int]) -> int:
    """Of hosts with so many ranks each, how many of the first make a world that some layout fits; others stand by."""
    worlds = list(accumulate(ranks))
    fits = (used for used in range(len(ranks), 0, -1) if layout.fitted(global_batch, worlds[used - 1]))
    return next(fits, 0)


def place(layout: str | None, on: str | None, nodes: int = 1) -> tuple[Layout, int]:
    """The layout and the number of ranks on each host, each from the other where only one is given.

    A layout that names no degree is of replicas: ``comm=int4`` on 4 ranks is ``dp=4,comm=int4``.
    """
    ranks = None if on is None else ranks_of(on)
    if layout is None:
        return Layout(dp=(ranks or 1) * nodes), ranks or 1
    parsed = Layout.parse(layout)
    named = {piece.partition("=")[0].strip() for piece in layout.split(",")}
    if ranks is not None and not named & {*DEGREES}:
        parsed = replace(parsed, dp=ranks * nodes)
    return parsed, max(1, parsed.world // nodes) if ranks is None else ranks


def ranks_of(on: str) -> int:
    place, _, number = on.partition(":")
    if place != "local":
        raise WrongUse(f"--on {on} is not this machine, where this is to run. Use local:N, e.g. local:2.")
    number, comma, more = number.partition(",")
    if comma:
        raise WrongUse(f"--on {on}: this machine takes no options such as {more}. Write it like local:2.")
    ranks = digits(number)
    if not ranks:
        raise WrongUse(f"--on {on} does not say how many ranks. Write it like local:2.")
    return ranks
