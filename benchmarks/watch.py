"""What it costs to watch a run: to record its steps, and to open a long run of many ranks.

    python benchmarks/watch.py [--quick] [--screenshot docs/watch.png]

Recording is `recording.py`'s; then events of a long run are read, thinned and shown.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import recording
from report import Figure, report

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.browser import CHROMIUM, Browser
from tests.watch.page.folders import BEGAN, SECONDS, append, start, step, write

from phalanx.run import Run
from phalanx.step_lines import EVERY, WHOLE
from phalanx.watch.page.answers import RunPages
from phalanx.watch.page.report import write_report
from phalanx.watch.page.table import RunTable

BAR = 2.0
"""Seconds until a run is open, of the events of 64 ranks and 10,000 steps."""


def generate(folder: Path, ranks: int, steps: int) -> Run:
    """A run as ranks leave it: one of them is killed half way, another is slower than the others for a while."""
    run, draw = write(folder, 0, 0), np.random.default_rng(0)
    run.write_settings({"run": {"task": "gpt", "layout": f"fsdp={ranks}"}, "settings": {"steps": steps, "width": 96}})
    again = steps // 2 - steps // 20
    for rank in range(ranks):
        own = random.Random(rank)
        for generation, begin, end in ((1, 0, steps // 2), (2, again, steps)):
            append(run, rank, start(rank, ranks, begin, generation))
            if rank == 0:
                append(run, 0, *(step(0, number, own) for number in range(begin, end)))
                continue
            slow = (np.arange(steps) // (steps // 8) == 5) & (rank == ranks // 3)
            seconds = draw.uniform(0.9, 1.2, (steps, len(SECONDS))) * list(SECONDS.values())
            seconds[:, 1:3] *= 1 + 0.7 * slow[:, None]
            times = (BEGAN + 0.12 * np.arange(steps) + draw.uniform(0.1, 0.11, steps)).tolist()
            with run.events_path(rank).open("a") as file:
                file.writelines(
                    _line(at, begin, times[at], dict(zip(SECONDS, seconds[at].tolist(), strict=True)))
                    for at in range(begin, end)
                )
    killed = {"step": steps // 2, "reason": "was ended by SIGKILL", "generation": 1}
    append(run, ranks // 2, {"kind": "failure", "time": BEGAN + 0.06 * steps, **killed})
    append(run, 0, *_story(steps))
    return run


def _line(at: int, begin: int, when: float, seconds: dict[str, float]) -> str:
    """What another rank than the first writes of a step (`StepLines`)."""
    whole = at < WHOLE or (at - begin) % EVERY == 0
    moment, digits = (f"{when!r}", "%.6f") if whole else (f"{when:.3f}", "%.4g")
    phases = ", ".join(f'"{phase}": {digits % value}' for phase, value in seconds.items())
    sent = ', "sent": {"fsdp": 1048576, "tp": 262144}' if whole else ""
    return f'{{"kind": "step", "time": {moment}, "step": {at}, "seconds": {{{phases}}}{sent}}}\n'


def _story(steps: int) -> Iterator[dict]:
    for at in range(1, 9):
        moment = {"time": BEGAN + 0.12 * at * steps // 8, "step": at * steps // 8}
        yield {"kind": "checkpoint", **moment, "seconds": 0.4}
        yield {"kind": "evaluation", **moment, "held_out": {"loss": 1.6 + 3 / at}}


def opening(folder: Path, ranks: int, steps: int, quick: bool) -> Iterator[Figure]:
    run = generate(folder / "big", ranks, steps)
    size = sum(path.stat().st_size for path in (run.path / "events").iterdir()) / 2**20
    pages = RunPages(lambda: {"big": run})
    began, used = time.perf_counter(), _used()
    pages.prepare()
    while not _asked(pages, "run")["ranks"]:
        time.sleep(0.01)
    _answers(pages)
    first = time.perf_counter() - began
    while _asked(pages, "run")["ranks"] < ranks:
        time.sleep(0.02)
    told, whole, work = _answers(pages), time.perf_counter() - began, _used() - used
    note = f"{size:.0f} MiB of events; {work:.2f} s of processors; {sum(map(len, told)) / 1e3:.0f} kB for the page"
    yield Figure(
        "watch, seconds until there is something to see", first, None, "all charts; the map has some ranks yet"
    )
    yield Figure(f"watch, seconds to open {ranks} ranks x {steps:,} steps", whole, None if quick else BAR, note)
    began = time.perf_counter()
    plain = RunTable(run)
    plain.refresh()
    yield Figure("watch, the same by one process", time.perf_counter() - began, None, "as a report reads it")
    known = json.loads(told[2])
    for rank in range(ranks):
        append(run, rank, step(rank, steps, random.Random(rank)))
    time.sleep(0.6)  # files are looked at again no sooner
    began = time.perf_counter()
    new = pages.answer(
        "/api/charts", {"run": "big", "columns": "1000", "since": str(known["version"]), "width": str(known["width"])}
    )[0]
    yield Figure("watch, seconds for one step more", time.perf_counter() - began, None, f"{len(new):,} bytes")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    yield Figure("watch, memory in MiB", memory, None, "most that the process held, Python and torch among it")


def _asked(pages: RunPages, what: str) -> dict:
    return json.loads(pages.answer(f"/api/{what}", {"run": "big"})[0])


def _answers(pages: RunPages) -> list[bytes]:
    """All that the page draws."""
    asked = {"run": "big", "columns": "1000"}
    return [pages.answer(f"/api/{what}", asked)[0] for what in ("run", "verdict", "charts", "heat", "spans")]


def _used() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def reporting(folder: Path) -> Iterator[Figure]:
    run = write(folder / "small", 2, 200)
    write_report(run)
    taken = []
    for _ in range(5):
        began = time.perf_counter()
        path = write_report(run)
        taken.append(time.perf_counter() - began)
    yield Figure(
        "report, seconds of 2 ranks x 200 steps", sorted(taken)[2], 0.25, f"{path.stat().st_size / 1e3:.0f} kB"
    )


def browsing(folder: Path, screenshot: Path | None, quick: bool) -> Iterator[Figure]:
    """The command, cold, and the page in a browser that is there: until charts are drawn, and until all is."""
    command = [sys.executable, "-m", "phalanx", "watch", str(folder / "big"), "--port", "0"]
    drawn = "Boolean(document.querySelector('[data-chart=loss] canvas'))"
    with Browser(1280, 1500) as browser:
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            address = re.search(r"http://\S+", process.stdout.readline())
            assert address is not None
            listens = time.perf_counter() - began
            browser.open(address[0])
            browser.until(drawn)
            first, note = time.perf_counter() - began, f"in Chromium; {listens:.2f} s until the command listens"
            bar = None if quick else BAR
            yield Figure("watch, seconds from the command to the first charts", first, bar, note)
            browser.until("document.body.dataset.ready")
            browser.until("!document.getElementById('live').innerText.startsWith('reading')")
            yield Figure("watch, seconds from the command to all ranks", time.perf_counter() - began, None, "likewise")
            if screenshot is not None:
                browser.until("document.body.dataset.concluded")
                browser.ask("scrollTo(0, 0)")
                browser.screenshot(screenshot)
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--screenshot", type=Path, help="where a picture of the page is put")
    options = parser.parse_args()
    ranks, steps = (16, 2000) if options.quick else (64, 10_000)
    with tempfile.TemporaryDirectory() as place:
        figures = [*recording.sizes(Path(place) / "sizes"), *recording.overhead(options.quick, Path(place))]
        figures += [*opening(Path(place), ranks, steps, options.quick), *reporting(Path(place))]
        if CHROMIUM is not None:
            figures += browsing(Path(place), options.screenshot, options.quick)
    report(figures)


if __name__ == "__main__":
    main()
