"""The verbs about runs that are there: ``phalanx runs``, ``status``, ``logs`` and ``cancel``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.words import printable

RUN = "a run's folder; by default the newest under runs/"


def runs(
    folder: Annotated[Path, typer.Argument(help="where they lie")] = Path("runs"),
    json: Annotated[bool, typer.Option("--json", help="print one JSON object a run and nothing else")] = False,
) -> None:
    """List runs: how far each is, and where it runs."""
    from phalanx.launch import standing

    found = standing.listed(folder)
    if json:
        print(*(each.to_json() for each in found), sep="\n", end="\n" if found else "")
    else:
        print(standing.table(found) if found else printable(f"there are no runs in {folder}"))


def status(
    run: Annotated[Path | None, typer.Argument(help=RUN)] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Say how a run stands, on this machine or where it was submitted."""
    from phalanx.launch import standing

    found = standing.Standing.of(standing.run_at(run))
    print(found.to_json() if json else found)


def logs(
    run: Annotated[Path | None, typer.Argument(help=RUN)] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on until the run ends")] = False,
) -> None:
    """Show what a run printed, or noted."""
    from phalanx.launch import standing

    verdict = standing.show_logs(standing.run_at(run), follow)
    print(verdict)
    raise SystemExit(verdict.exit_code)


def cancel(run: Annotated[Path, typer.Argument(help="a run's folder")]) -> None:
    """Ask a run to save and end, wherever it runs."""
    from phalanx.launch import standing

    print(printable(standing.cancel(standing.run_at(run))))
