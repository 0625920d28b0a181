"""The verbs ``doctor`` and ``probe``: is the ground fit to train on, and how fast is it?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.verdict import Verdict

On = Annotated[str | None, typer.Option(help="local:N, or any place that train takes")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; by default GPUs if there are any")]
Folder = Annotated[Path | None, typer.Option(help="a folder that all hosts see, where there are several")]
Timeout = Annotated[float | None, typer.Option(help="seconds that hosts wait for each other")]
MaxNodes = Annotated[int | None, typer.Option(help="so many hosts, with this command on each")]
Meet = Annotated[str | None, typer.Option(help="where they meet, host:port")]
Host = Annotated[str | None, typer.Option(help="this host's name among them")]
Interface = Annotated[str | None, typer.Option(help="through which they reach this host")]


def doctor(
    on: On = None,
    device: Device = None,
    run: Folder = None,
    timeout: Timeout = None,
    max_nodes: MaxNodes = None,
    meet: Meet = None,
    host: Host = None,
    interface: Interface = None,
) -> None:
    """Examine the ground before a run: versions, clocks, memory, disk, devices, links, the shared folder."""
    given = {"on": on, "device": device, "run": run, "timeout": timeout, "max_nodes": max_nodes, "meet": meet}
    _examine("doctor", given | {"host": host, "interface": interface})


def probe(
    out: Annotated[Path | None, typer.Option(help="write what was measured here, e.g. cluster.toml")] = None,
    on: On = None,
    device: Device = None,
    run: Folder = None,
    timeout: Timeout = None,
    max_nodes: MaxNodes = None,
    meet: Meet = None,
    host: Host = None,
    interface: Interface = None,
) -> None:
    """Measure this machine and its links: latency, bandwidth, compute, and what each codec can encode."""
    given = {"on": on, "device": device, "run": run, "timeout": timeout, "max_nodes": max_nodes, "meet": meet}
    _examine("probe", given | {"host": host, "interface": interface, "out": out})


def _examine(verb: str, given: dict[str, Any]) -> None:
    from phalanx.launch.local_leader import led
    from phalanx.launch.place import place_of
    from phalanx.launch.started import Started

    given |= {"min_nodes": None, "task": verb, "layout": None}
    with led(Started.unless_placed(given["on"]), given["device"]) as started:
        if (place := place_of(given["on"])) is None:
            from phalanx.train.doctor import doctor
            from phalanx.train.probe import probe

            here = {"doctor": doctor, "probe": probe}[verb]
            conclude(here(given if started is None else started.over(given)))
        else:
            from phalanx.train.doctor_elsewhere import doctor_elsewhere

            conclude(doctor_elsewhere(given, place))


def conclude(verdict: Verdict) -> None:
    """Print what a verb came to, and leave with its exit code."""
    if sys.stdout.isatty():
        print("\r\x1b[K", end="", flush=True)  # over the live line, where the run was stopped in the middle of it
    print(verdict, file=sys.stdout if verdict.holds else sys.stderr, flush=True)
    raise SystemExit(verdict.exit_code)
