"""What it costs to record every step: time against steps of which nothing is recorded, and bytes of events.

    python benchmarks/recording.py [--quick]

One engine takes steps of about 20 ms, with and without recording: flight record, what was sent, events, communication
and memory. Unrecorded, a collective calls nothing of ours, and a phase neither; the same collectives are launched.

Steps come in blocks of two that are recorded and two that are not, in an order drawn for each block: whatever every
second step does, or the first after a switch, falls on both. What is told is the median over blocks of the difference
between their means, with its 95% interval (bootstrap). The same is told of the two unrecorded steps, one drawn against
the other: how far from 1 such a figure lies where there is nothing to be found. Processor time is that of the rank's
main thread, which other work changes little.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from phalanx.parallel.communication.compiled_notes import PLAIN, fastest
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
RECORDED = (True, True, False, False)
"""Steps of a block, in an order drawn for each."""
WARM_BLOCKS = 5
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


def launched(traffic: Traffic, step: Callable[[], object]) -> list[str]:
    """The collectives of a step, by kind."""
    found, way = [], traffic.launched

    def listed(*given: Any) -> Any:
        found.append(given[3])
        return way(*given)

    traffic.launched = listed
    step()
    return found


def difference(pairs: Sequence[tuple[float, float]], draws: int = 1000) -> tuple[float, float, float]:
    """The first to the second, by the median of their differences; and its 95% interval."""
    apart, usual, drawn = [a - b for a, b in pairs], statistics.median(b for _, b in pairs), random.Random(0)
    medians = sorted(statistics.median(drawn.choices(apart, k=len(apart))) for _ in range(draws))
    low, high = medians[round(0.025 * draws)], medians[round(0.975 * draws) - 1]
    return 1 + statistics.median(apart) / usual, 1 + low / usual, 1 + high / usual


def ratios(blocks: Sequence[Sequence[float]]) -> tuple[float, str]:
    """Recorded steps to others, and what is to be said of it."""
    ratio, low, high = difference([(sum(block[:2]) / 2, sum(block[2:]) / 2) for block in blocks])
    _, least, most = difference([(block[2], block[3]) for block in blocks])
    usual = statistics.median(sum(block[2:]) / 2 for block in blocks)
    return ratio, (
        f"95%: {low:.4f} to {high:.4f}; of {1e3 * usual:.2f} ms, {1e6 * (ratio - 1) * usual:.0f} microseconds; "
        f"none to none {least:.4f} to {most:.4f}; {len(blocks)} blocks"
    )


@dataclass
class Blocks:
    """Of one rank: by block, what its steps took."""

    time: list[list[float]] = field(default_factory=list)
    processor: list[list[float]] = field(default_factory=list)
    """Seconds, and processor seconds of the main thread: of recorded steps first, as `RECORDED` has them."""
    noting: list[float] = field(default_factory=list)
    """Processor seconds of noting a step in the run's events."""
    collectives: int = 0
    """In a step, recorded or not."""
    compiled: bool = False
    """Whether collectives are noted by C."""


def compare(layout: str, batch: int, blocks: int, folder: Path) -> Blocks:
    """On a rank."""
    environment = Environment.detect()
    recorder = FlightRecorder(memoryview(bytearray(flight.BYTES)), environment.rank, environment.world, 1)
    traffic = Traffic(recorder=recorder)
    record, order = silenced(traffic), random.Random(0)  # all ranks draw the same
    found = Blocks(compiled=fastest() is not PLAIN)
    with (
        taken(folder, environment.rank) as ring,
        phalanx.Engine(GPT(**SHAPE, global_batch=batch), layout, device="cpu", traffic=traffic) as engine,
    ):
        recording, batches = _recording(engine, folder, ring), engine.batches()
        kinds = []
        for on in (True, True, False):  # the first step tries the model
            record(on)
            kinds.append(launched(traffic, lambda: engine.step(next(batches))))
        assert kinds[1] == kinds[2], kinds
        found.collectives = len(kinds[2])
        for block in range(blocks + WARM_BLOCKS):
            times, processor = [0.0] * len(RECORDED), [0.0] * len(RECORDED)
            for place in order.sample(range(len(RECORDED)), len(RECORDED)):
                record(RECORDED[place])
                data = next(batches)
                began, used = time.perf_counter(), time.thread_time()
                traffic.begins(engine.step_number)
                metrics = engine.step(data)
                stepped = time.thread_time()
                if RECORDED[place]:
                    recording.note(metrics)
                    found.noting.append(time.thread_time() - stepped)
                processor[place], times[place] = time.thread_time() - used, time.perf_counter() - began
            if block >= WARM_BLOCKS:
                found.time.append(times)
                found.processor.append(processor)
        recording.log.close()
    return found


def overhead(quick: bool, folder: Path) -> Iterator[Figure]:
    blocks = 60 if quick else 400
    for name, layout, ranks, batch in (("1 rank", "dp=1", 1, 4), ("2 ranks fsdp=2", "fsdp=2", 2, 8)):
        outcome = run_ranks(partial(compare, layout, batch, blocks, folder / name), ranks)
        assert outcome.result is not None, outcome.failures
        found = outcome.result
        for what, taken in (("time", found.time), ("processor time", found.processor)):
            ratio, note = ratios(taken)
            yield Figure(f"recording, {name}, {what} of a step to none", ratio, BAR, note)
        by = "C" if found.compiled else "Python, which is slower"
        own = f"processor time of noting a step; its {found.collectives} collectives are noted by {by}"
        yield Figure(f"recording, {name}, microseconds", 1e6 * statistics.median(found.noting), None, own)


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
