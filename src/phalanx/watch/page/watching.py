"""``phalanx watch`` and ``phalanx report``: a run, or a folder of them, shown."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from phalanx import streams
from phalanx.errors import WrongUse
from phalanx.events import say
from phalanx.folder_files import is_folder, names
from phalanx.run import Run
from phalanx.words import printable

PORT = 8347
HOST = "127.0.0.1"


def watch(
    run: Annotated[Path, typer.Argument(help="a run's folder, or one that has several")] = Path("runs"),
    port: Annotated[int, typer.Option(help="where the page is; 0: any port that is free")] = PORT,
    host: Annotated[str, typer.Option(help="an address of this machine; beyond itself only with --token")] = HOST,
    token: Annotated[
        str | None, typer.Option(envvar="PHALANX_TOKEN", help="what whoever opens the page must know")
    ] = None,
) -> None:
    """Show a run live in a browser, or several side by side: what it learns, and where each rank's time goes."""
    from phalanx.watch.page.answers import RunPages
    from phalanx.watch.page.server import serve

    if token == "":
        raise WrongUse("--token, or PHALANX_TOKEN, is empty. Give one of 8 letters or more, or leave it out.")

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        pages = RunPages(runs_of(run))
        with serve(pages, host, port, token or "") as server:
            named, key = f"[{host}]" if ":" in host else host, f"?token={token}" if token else ""
            place = f"http://{named}:{server.server_address[1]}/{key}"
            told = f"  watch  {run} at {place}  (Ctrl-C ends this; the run goes on)"
            streams.print_whole(printable(told))
            pages.prepare()
            server.serve_forever(poll_interval=0.1)
    except KeyboardInterrupt:
        say("\n  ended  nobody watches any more; the run goes on")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def report(run: Annotated[Path, typer.Argument(help="a run's folder")]) -> None:
    """Write a run's page into one file, report.html in its folder."""
    from phalanx.watch.page.report import write_report

    if not is_run(run):
        raise WrongUse(f"{run} is no run's folder. Give one that phalanx runs lists.")
    say(f" report  {write_report(Run(run))}")


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # taken away meanwhile
        return 0.0


def is_run(path: Path) -> bool:
    return os.path.isfile(path / "run.toml") or os.path.isdir(path / "events")


def runs_of(path: Path) -> Callable[[], Mapping[str, Run]]:
    """Those that may be seen, by name, the newest last: a run alone, or all of a folder, also those that come yet."""
    if is_run(path):
        alone = {path.resolve().name: Run(path)}
        return lambda: alone
    if not path.is_dir():
        raise WrongUse(f"{path} is not there. Give the folder of a run, or one that has several, such as runs.")

    def found() -> dict[str, Run]:
        runs = [path / name for name in names(path, path, is_folder) if is_run(path / name)]
        return {each.name: Run(each) for each in sorted(runs, key=lambda each: (_changed(each), each.name))}

    for name in names(path, path, os.DirEntry.is_symlink):
        each = path / name
        if is_run(each) and not each.resolve().is_relative_to(path.resolve()):
            say(f"   note  {each} leads out of {path} and is not shown: give its own folder to see it")
    if not found():
        raise WrongUse(f"{path} has no run in it. Give the folder of a run, or one that has several, such as runs.")
    return found
