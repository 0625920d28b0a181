"""``phalanx tune``: a learning rate, or the largest micro-batch, found by trying."""

from __future__ import annotations

import json as json_text
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx import cli_options as option
from phalanx.errors import WrongUse
from phalanx.verdict import Verdict
from phalanx.words import in_bytes

if TYPE_CHECKING:
    from phalanx.train.batch_search import Fitting
    from phalanx.train.job import Job

OUT = Path("tune.json")
LOW, HIGH, SWEPT = 1e-6, 1.0, 100
"""The first rate, the last, and how many."""
TRIED = 2
"""Steps of each micro-batch."""


def tune(
    what: Annotated[str, typer.Argument(metavar="rate|batch", help="a learning rate, or the largest micro-batch")],
    task: Annotated[str, typer.Argument(help=option.TASK)],
    layout: option.Layout = None,
    on: option.On = None,
    set_: option.Set = [],  # noqa: B006
    device: option.Device = None,
    steps: Annotated[int | None, typer.Option(help="of the sweep, by default 100; of each batch tried, 2")] = None,
    low: Annotated[float | None, typer.Option(help="rate: the first one; by default 1e-6")] = None,
    high: Annotated[float | None, typer.Option(help="rate: the last one; by default 1")] = None,
    memory: Annotated[str | None, typer.Option(help="batch: what a rank may hold, e.g. 4GiB; a CPU needs it")] = None,
    most: Annotated[int | None, typer.Option(help="batch: try no more samples; by default 1024")] = None,
    out: Annotated[Path, typer.Option(help="the JSON file to write")] = OUT,
    json: Annotated[bool, typer.Option("--json", help="print that object and nothing else")] = False,
    unchecked: Annotated[bool, typer.Option("--unchecked", help="do not check the task first")] = False,
) -> None:
    """Find a learning rate, or the largest micro-batch that fits in memory, by trying; no run is left."""
    from phalanx.streams import led_elsewhere
    from phalanx.train.resolving import resolve

    if what not in ("rate", "batch"):
        raise WrongUse(f"{what!r} cannot be tuned. Choose rate or batch: phalanx tune rate {task}")
    others = {"memory": memory, "most": most} if what == "rate" else {"low": low, "high": high}
    for name, value in others.items():
        if value is not None:
            meant = "batch" if what == "rate" else "rate"
            raise WrongUse(f"--{name} {value} is for phalanx tune {meant}. Leave it out.")
    shown = sys.stdout
    if json:
        shown = os.fdopen(os.dup(1), "w")
        led_elsewhere(os.dup(2), os.dup(2))  # what the task prints is not the object
    job = resolve(task=task, layout=layout, on=on, assignments=set_, steps=None, config=None, device=device)
    if not unchecked:
        job.check()
    if what == "rate":
        ends = LOW if low is None else low, HIGH if high is None else high
        verdict, found = _rate(job, *ends, SWEPT if steps is None else steps)
    else:
        verdict, found = _batch(job, memory, TRIED if steps is None else steps, most, quiet=json)
    _write(out, {"task": task, "layout": str(job.layout), "holds": verdict.holds, **found})
    print(json_text.dumps({"summary": verdict.summary, **found}) if json else f"{verdict}\nwritten: {out}", file=shown)
    shown.flush()
    raise SystemExit(verdict.exit_code)


def _write(path: Path, found: dict[str, Any]) -> None:
    from phalanx.files import make_folders, write_whole

    make_folders(path.parent)
    write_whole(path, json_text.dumps(found, indent=1) + "\n")


def _rate(job: Job, low: float, high: float, steps: int) -> tuple[Verdict, dict[str, Any]]:
    from phalanx.train.rate_sweep import sweep

    found = sweep(job, low, high, steps)
    suggested = found.suggested
    places = {"steepest": found.steepest, "lowest": found.lowest} if found.falls else {}
    result = asdict(found) | places | {"suggested": suggested}
    if suggested is None:
        more = "" if found.rates else " The first loss was not finite already."
        summary = f"the loss does not fall at any rate from {low:g} to {high:g}.{more}"
        return Verdict(
            False, summary, found.drawn(sys.stdout.encoding), "Sweep others: --low, --high, --steps."
        ), result
    ended = f"the loss diverged at {found.rates[-1]:.2g}" if found.diverged else f"no rate up to {high:g} diverged"
    told = [
        *found.drawn(sys.stdout.encoding),
        f"{ended}; the loss was lowest at {found.lowest:.2g}, and fell most steeply at {found.steepest:.2g}",
    ]
    if found.asked == job.task.learning_rate:
        how = f"Train with it: --set learning_rate={suggested:.2g}"
    else:
        times = f"{suggested / found.asked:.2g}"
        how = f"Its optimizer has a rate of its own, {found.asked:g}: multiply its rates by {times}."
    return Verdict(True, f"a learning rate of {suggested:.2g} is suggested", told, how), result


def _batch(job: Job, memory: str | None, steps: int, most: int | None, quiet: bool) -> tuple[Verdict, dict[str, Any]]:
    from phalanx.train.batch_search import MOST, bytes_of, search

    limit = None if memory is None else bytes_of(memory)

    def tell(one: Fitting) -> None:
        held = f"{in_bytes(one.peak)} a rank" if one.peak else "out of memory"
        if not quiet:
            print(f"micro_batch={one.size:<5} {held:>16}  {'fits' if one.fits else 'does not fit'}", flush=True)

    found = search(job, limit, steps, MOST if most is None else most, tell)
    result = {
        "largest": found.largest,
        "memory": limit,
        "most": found.most,
        "tried": [asdict(one) for one in found.tried],
    }
    if not found.largest:
        summary = f"not even one sample fits under {job.layout}"
        how = "What helps: recompute=full, fsdp with zero=3, offload, or a narrower precision."
        return Verdict(False, summary, next=how), result
    layout = replace(job.layout, micro_batch=found.largest)
    end = " Larger ones were not tried: --most, or more data, would." if found.largest == found.most else ""
    ranks = job.layout.batch_ranks
    how = f"Train with it: --layout {layout} --set global_batch={found.largest * ranks}, or a multiple of that."
    return Verdict(True, f"micro_batch={found.largest} is the largest that fits.{end}", next=how), result
