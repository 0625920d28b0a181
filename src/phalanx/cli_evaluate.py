"""``phalanx evaluate``: a run's measures on held-out or other data."""

from __future__ import annotations

import json as jsons
from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx import cli_options as option
from phalanx.errors import WrongUse


def evaluate(
    run: Annotated[Path, typer.Argument(help="a run's folder")],
    checkpoint: Annotated[int | None, typer.Option(metavar="STEP", help="which one; by default the newest")] = None,
    data: Annotated[str, typer.Option(help="held-out, or training: what the task trains on")] = "held-out",
    set_: option.Set = [],  # noqa: B006
    layout: option.Layout = None,
    on: Annotated[str | None, typer.Option(help="local:N, so many ranks; by default as the run was")] = None,
    device: option.Device = None,
    answers: Annotated[int | None, typer.Option(help="questions that a language model answers; by default 16")] = None,
    judge: Annotated[
        str | None, typer.Option(metavar="FILE.py:FUNCTION", help="scores (question, answer, reference) with a number")
    ] = None,
    checkpoints: Annotated[str | None, typer.Option(help="where they lie; by default as the run says")] = None,
    trust: option.Trust = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="each checkpoint as it is committed, until the run has ended")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Evaluate a checkpoint of a run by its task's own measures, under any layout."""
    from phalanx.train.evaluating import Evaluator
    from phalanx.train.following_checkpoints import follow as followed

    if follow and (json or checkpoint is not None):
        raise WrongUse("--follow evaluates every checkpoint, a line each. Leave --checkpoint and --json out.")
    made = Evaluator.of(
        run, assignments=set_, layout=layout, on=on, device=device, data=data, answers=answers, judge=judge,
        checkpoints=checkpoints, trust=trust,
    )  # fmt: skip
    if follow:
        followed(made, set_)
        return
    found = made.evaluate(made.chosen(checkpoint))
    where = made.note(found, set_)
    if json:
        told: dict[str, Any] = {"run": str(run), "step": found.step, "data": data, "layout": str(made.job.layout)}
        print(jsons.dumps(told | {"measures": found.measures, "answers": where or None}))
        return
    width = max(map(len, found.measures))
    print(f"{run}, step {found.step}, {data} data, {made.job.layout}")
    for name, value in found.measures.items():
        print(f"  {name:<{width}}  {value:.6g}")
    if where:
        print(f"{len(found.answers)} answers: {where}")
    elif answers:
        print("no answers: questions are of held-out rows, and there are none. Set share_held_out above 0.")
