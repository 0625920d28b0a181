"""From the options of ``phalanx train`` to a verdict: here, or where ``--on`` says.

What is imported only where it is used imports torch: a job is submitted sooner without.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.errors import WrongUse
from phalanx.launch.place import Command, Place, place_of, words_of
from phalanx.launch.stopping import GRACE
from phalanx.run import Run, short_name
from phalanx.verdict import Verdict

if TYPE_CHECKING:
    from phalanx.train.job import Job

Given = Mapping[str, Any]
"""By name, what the command line has; None: it was not given."""


def train(given: Given) -> Verdict:
    """Run it to the end."""
    place = place_of(given["on"])
    options = _taken_up(given)
    if place is None:
        from phalanx.train import running

        return running.train(_job(options, None), options["run"], options["resume"])
    if options["task"] is None:
        _job(options, place)  # which says what is missing, or the task is in a run.toml
    made = Run.folder if options["resume"] else Run.create
    run = made(options["run"], short_name(options["task"] or "run"))
    try:
        return place.train(_command(options, place, run.path.resolve()), lambda: _job(options, place))
    finally:
        with suppress(OSError):  # it is not empty: something came of it
            run.path.rmdir()


def described(given: Given, every_weight: bool) -> str:
    """What would run, and what would be submitted."""
    from phalanx.train import describing

    place = place_of(given["on"])
    options = _taken_up(given)
    job = _job(options, place)
    text = "\n".join([describing.describe(job, every_weight), *job.check()])
    if place is None:
        return text
    path = Path(options["run"] or f"runs/{short_name(job.reference)}-NNN").resolve()
    return f"{text}\n\n{place.preview(_command(options, place, path))}"


def _taken_up(given: Given) -> dict[str, Any]:
    """The options as seen from the folder that a run which goes on, or is repeated, was started in."""
    options = dict(given)
    if options["resume"] or options["config"] is not None:
        from phalanx.train.folders import taken_up
        from phalanx.train.options import full_path

        options["checkpoints"], options["init_from"] = full_path(given["checkpoints"]), full_path(given["init_from"])
        options["run"], options["config"], options["task"] = taken_up(
            given["run"], given["config"], given["task"], given["resume"]
        )
    return options


def _job(options: Given, place: Place | None) -> Job:
    """Resolved and checked, as far as can be here."""
    from phalanx.cluster import Cluster
    from phalanx.train.resolving import resolve

    words = {name: value for name, value in options.items() if name != "run"}
    if place is None:
        return resolve(**words)
    if place.nodes > 1 and options["evaluate_on"] is not None:
        raise WrongUse(
            "--evaluate-on is a process on one host. With several, run phalanx evaluate RUN --follow on one of them."
        )
    here = dict.fromkeys(("min_nodes", "max_nodes", "meet", "host", "interface"))  # those are for the hosts there
    words["assignments"] = [place.tried(word) for word in words["assignments"]]
    job = resolve(**{**words, **here, "on": f"local:{place.world}", "device": "cpu"})
    return replace(job, cluster=Cluster(_device(options, place), place.ranks, place.nodes))


def _device(options: Given, place: Place) -> str:
    return options["device"] or ("cuda" if place.gpus else "cpu")


def _command(options: Given, place: Place, run: Path) -> Command:
    """What each host is to run."""
    named = {} if options["task"] else {"trust": True}  # whoever submits it has been asked whose code it is
    words = words_of({**options, **named}, left_out=("on", "run", "resume", "device"))
    grace = GRACE if options["grace"] is None else options["grace"]
    device = ("--device", _device(options, place))
    return Command(sys.executable, (*words, *device), Path.cwd(), run, run.name, grace, options["resume"])
