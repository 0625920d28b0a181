"""What it costs to record every step: time against steps of which nothing is recorded, and bytes of events.

    python benchmarks/recording.py [--quick]

One engine takes steps of about 20 ms, in turns with and without recording: flight record, what was sent, events,
communication and memory. Unrecorded, a collective calls nothing of ours, and a phase neither. The ratio is of medians;
processor time is that of the rank's main thread, which other work changes little.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch import nn

import phalanx
from phalanx import flight
from phalanx.event_ring import EventRing
from phalanx.events import EventLog
from phalanx.launch.environment import Environment
from phalanx.launch.event_writer import EventWriter
from phalanx.launch.local import run_ranks
from phalanx.parallel.communication.recorder import FlightRecorder
from phalanx.parallel.communication.traffic import Traffic
from phalanx.recipes.gpt import GPT
from phalanx.run import Run
from phalanx.step_lines import WHOLE
from phalanx.train.model_flops import ModelFlops
from phalanx.train.recording import StepRecording
from phalanx.train.utilisation import Utilisation
from report import Figure, report

BAR, MOST_BYTES = 1.01, 200
SHAPE = {"width": 64, "layers": 4, "heads": 2, "kv_heads": 2, "length": 64, "megabytes": 1.0, "steps": 100_000}


@dataclass
class Digits(phalanx.Task):
    """Steps that take next to no time."""

    global_batch: int = 8
    steps: int = WHOLE + 500

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def data(self) -> phalanx.data.Arrays:
        made = torch.Generator().manual_seed(0)
        return phalanx.data.Arrays(x=torch.randn(64, 16, generator=made), y=torch.randint(0, 4, (64,), generator=made))

    def inputs(self, batch: dict) -> torch.Tensor:
        return batch["x"]

    def loss(self, output: torch.Tensor, batch: dict) -> phalanx.Loss:
        return phalanx.losses.cross_entropy(output, batch["y"])


def silenced(traffic: Traffic) -> Callable[[bool], None]:
    """Has collectives and phases recorded from now on, or not."""
    recorder, nothing = traffic.recorder, threading.RLock()  # which is entered and left without a line of Python
    noting = traffic.launched, traffic.recorded, recorder.doing

    def entered(*given: Any) -> Any:
        return nothing

    def switch(on: bool) -> None:
        ways: Any = noting if on else (entered, entered, entered)
        traffic.launched, traffic.recorded, recorder.doing = ways

    return switch


def _recording(engine: phalanx.Engine, folder: Path, ring: EventRing | None = None) -> StepRecording:
    rank = engine.rank
    log = EventLog(Run(folder), rank, shared=rank == 0, ring=ring)
    used = Utilisation(engine.world, "a CPU", 1e12, lambda: ModelFlops(1e9)) if rank == 0 else None
    return StepRecording(engine, log, used)


@contextmanager
def taken(folder: Path, rank: int) -> Iterator[EventRing]:
    """A ring whose other end is a process of its own, as a rank's supervisor is."""
    writer, over = EventWriter(Run(folder), 1), multiprocessing.get_context("fork").Event()
    writer.begin(rank)
    pid = os.fork()
    if not pid:
        writer.start()
        over.wait()
        writer.end()
        os._exit(0)
    yield writer.rings[0]
    over.set()
    os.waitpid(pid, 0)


def compare(layout: str, batch: int, pairs: int, folder: Path) -> list[list[list[float]]]:
    """On a rank: seconds and processor seconds of steps, recorded and not; and processor seconds of what notes them."""
    environment = Environment.detect()
    recorder = FlightRecorder(memoryview(bytearray(flight.BYTES)), environment.rank, environment.world, 1)
    traffic = Traffic(recorder=recorder)
    record = silenced(traffic)
    with (
        taken(folder, environment.rank) as ring,
        phalanx.Engine(GPT(**SHAPE, global_batch=batch), layout, device="cpu", traffic=traffic) as engine,
    ):
        recording, batches = _recording(engine, folder, ring), engine.batches()
        found: list[list[list[float]]] = [[[], []], [[], [], []]]
        for turn in range(2 * pairs + 20):
            on = turn % 2 == 0
            record(on)
            data = next(batches)
            began, used = time.perf_counter(), time.thread_time()
            traffic.begins(engine.step_number)
            metrics = engine.step(data)
            stepped = time.thread_time()
            if on:
                recording.note(metrics)
            if turn >= 20 and on:
                found[1][2].append(time.thread_time() - stepped)
            if turn >= 20:
                found[on][0].append(time.perf_counter() - began)
                found[on][1].append(time.thread_time() - used)
        recording.log.close()
    return found


def overhead(quick: bool, folder: Path) -> Iterator[Figure]:
    pairs = 60 if quick else 240
    for name, layout, ranks, batch in (("1 rank", "dp=1", 1, 4), ("2 ranks fsdp=2", "fsdp=2", 2, 8)):
        outcome = run_ranks(partial(compare, layout, batch, pairs, folder / name), ranks)
        assert outcome.result is not None, outcome.failures
        off, on = outcome.result
        for what, column in (("time", 0), ("processor time", 1)):
            ours, theirs = statistics.median(on[column]), statistics.median(off[column])
            note = f"{1e3 * ours:.2f} ms to {1e3 * theirs:.2f} ms, medians of {pairs} steps each"
            yield Figure(f"recording, {name}, {what} of a step to none", ours / theirs, BAR, note)
        own = f"processor time of noting a step, of {1e3 * statistics.median(off[1]):.1f} ms that it takes"
        yield Figure(f"recording, {name}, microseconds", 1e6 * statistics.median(on[2]), None, own)


def lines(folder: Path) -> None:
    """On a rank: a run that is longer than what is written whole."""
    with phalanx.Engine(Digits(), device="cpu") as engine:
        recording = _recording(engine, folder)
        for batch in engine.batches():
            recording.note(engine.step(batch))
        recording.log.close()


def sizes(folder: Path) -> Iterator[Figure]:
    outcome = run_ranks(partial(lines, folder), 2)
    assert not outcome.failures, outcome.failures
    for rank, name in enumerate(("the first rank", "another rank")):
        written = Run(folder).events_path(rank).read_bytes().splitlines(keepends=True)
        early, late = written[:WHOLE], written[WHOLE:]
        note = f"{sum(map(len, early)) / len(early):.0f} before, of {len(late)} steps"
        yield Figure(
            f"events, bytes a step of {name} after {WHOLE:,}", sum(map(len, late)) / len(late), MOST_BYTES, note
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        report([*sizes(Path(place) / "sizes"), *overhead(options.quick, Path(place))])


if __name__ == "__main__":
    main()
