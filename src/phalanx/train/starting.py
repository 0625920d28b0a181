"""From the options of ``phalanx train`` to a verdict: here, or where ``--on`` says."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.cluster import Cluster
from phalanx.launch.place import Command, Place, place_of, words_of
from phalanx.references import short_name
from phalanx.run import Run
from phalanx.train import describing, running
from phalanx.train.folders import taken_up
from phalanx.train.job import Job
from phalanx.train.options import full_path
from phalanx.train.resolving import resolve
from phalanx.verdict import Verdict

Given = Mapping[str, Any]
"""By name, what the command line has; None: it was not given."""


def train(given: Given) -> Verdict:
    """Run it to the end."""
    place = place_of(given["on"])
    given, job = _resolved(given, place)
    if place is None:
        return running.train(job, given["run"], given["resume"])
    made = Run.folder if given["resume"] else Run.create
    run = made(given["run"], short_name(job.reference))
    return place.train(_command(given, job, run.path.resolve()))


def described(given: Given, every_weight: bool) -> str:
    """What would run, and what would be submitted."""
    place = place_of(given["on"])
    given, job = _resolved(given, place)
    text = "\n".join([describing.describe(job, every_weight), *job.check()])
    if place is None:
        return text
    path = Path(given["run"] or f"runs/{short_name(job.reference)}-NNN").resolve()
    return f"{text}\n\n{place.preview(_command(given, job, path))}"


def _resolved(given: Given, place: Place | None) -> tuple[Given, Job]:
    """The job, and the options as seen from the folder that a run which goes on was started in."""
    options = dict(given)
    if options["resume"] or options["config"] is not None:
        options["checkpoints"], options["init_from"] = full_path(given["checkpoints"]), full_path(given["init_from"])
        options["run"], options["config"], options["task"] = taken_up(
            given["run"], given["config"], given["task"], given["resume"]
        )
    words = {name: value for name, value in options.items() if name != "run"}
    if place is None:
        return options, resolve(**words)
    device = options["device"] or ("cuda" if place.gpus else "cpu")
    here = dict.fromkeys(("min_nodes", "max_nodes", "meet", "host", "interface"))  # those are for the hosts there
    words["assignments"] = [place.tried(word) for word in words["assignments"]]
    job = resolve(**{**words, **here, "on": f"local:{place.nodes * place.ranks}", "device": "cpu"})
    return options, replace(job, cluster=Cluster(device, place.ranks, place.nodes))


def _command(given: Given, job: Job, run: Path) -> Command:
    """What each host is to run."""
    words = words_of(given, left_out=("on", "run", "resume", "device"))
    device = ("--device", job.cluster.device)
    return Command(sys.executable, (*words, *device), Path.cwd(), run, run.name, job.options.grace)
