"""Whole weights of ZeRO 1 and 2 that come while the next step begins, beside waiting for them; and sizes of buckets.

    python benchmarks/whole_weights.py [--quick] [--only coming|buckets] [--mbits 1000]

One engine trains segments of steps in turns: in some it waits after each step until all weights are there, as if
nothing overlapped. A figure is the median of the ratios of neighbours, in seconds and in seconds of processors, of all
threads. With ``--mbits`` ranks are on hosts that a link of so many Mbit/s joins (as root), else on this machine.
Buckets: engines that differ in their size alone take steps in turns in the same processes, each beside the one of 25.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

import phalanx
from phalanx.launch.environment import Environment
from phalanx.launch.local import run_ranks
from phalanx.parallel.weights import bucket
from phalanx.parallel.weights.coming import Arrival
from phalanx.recipes.gpt import GPT
from report import Figure, report
from slow_network import SlowNetwork, wait_for

SHAPE: dict[str, Any] = {"width": 512, "heads": 8, "kv_heads": 8, "megabytes": 0.3, "steps": 10_000}
SIZES = 5, 10, 25, 50, 100
Times = tuple[float, float]
"""Seconds, and seconds of processors."""


class Plain(GPT):
    """Without moments: there are several engines in a process."""

    def optimizer(self, params: Any) -> Any:
        return torch.optim.SGD(params, lr=1e-3)


def timed(work: Any) -> Times:
    began = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began[0], time.process_time() - began[1]


def coming(zero: int, rounds: int, segment: int) -> dict[str, Any]:
    """On a rank: seconds of segments that waited for all weights after each step, and of those that did not."""
    environment = Environment.detect()
    environment.join(environment.device("cpu"))
    waits, need = [0, 0.0], Arrival.need

    def counted(self: Arrival) -> None:
        if self._pending is not None:
            began = time.perf_counter()
            need(self)
            waits[0] += 1
            waits[1] += time.perf_counter() - began

    Arrival.need = counted  # type: ignore[method-assign]
    world = environment.world
    task = GPT(**SHAPE, layers=10, length=128, global_batch=4 * world)
    found: dict[str, list[Times]] = {"waits": [], "comes": []}
    told: dict[str, list[float]] = {"waits": [0, 0.0], "comes": [0, 0.0]}
    with phalanx.Engine(task, f"fsdp={world},zero={zero}", device="cpu") as engine:
        batches = engine.batches()

        def steps(kind: str, number: int) -> None:
            for _ in range(number):
                engine.step(next(batches))
                if kind == "waits":
                    engine.spread.settle()
            engine.spread.settle()

        steps("comes", 2)
        for turn in range(rounds):
            for kind in ("waits", "comes")[:: 1 if turn % 2 else -1]:
                before = list(waits)
                found[kind].append(timed(partial(steps, kind, segment)))
                told[kind] = [told[kind][0] + waits[0] - before[0], told[kind][1] + waits[1] - before[1]]
        buckets = len(engine.spread.buckets)
    environment.leave()
    return {**found, "told": told, "buckets": buckets}


def sizes(rounds: int) -> list[list[Times]]:
    """On a rank: of each size, seconds of steps in turns."""
    environment = Environment.detect()
    environment.join(environment.device("cpu"))
    world = environment.world
    task = Plain(**SHAPE, layers=10, length=64, global_batch=2 * world)
    engines, found = [], [list[Times]() for _ in SIZES]
    for size in SIZES:
        bucket.BUCKET_BYTES = bucket.GLOO_BYTES = size << 20
        engine = phalanx.Engine(task, f"dp={world}", device="cpu")
        engines.append((engine, engine.batches()))
    for turn in range(rounds + 1):
        for place, (engine, batches) in enumerate(engines):
            one = timed(lambda: engine.step(next(batches)))  # noqa: B023 - it is called now
            if turn:
                found[place].append(one)
    for engine, _ in engines:
        engine.close()
    environment.leave()
    return found


def on_hosts(zero: int, rounds: int, segment: int, mbits: float) -> dict[str, Any]:
    """`coming` of two ranks, each on a host of its own."""
    with tempfile.TemporaryDirectory() as folder, SlowNetwork(2, Path(folder), mbits) as network:
        results = Path(folder) / "results.json"
        words = [zero, rounds, segment, str(results)]
        with network.ranks(__file__, words) as ranks:
            wait_for(ranks)
        found: dict[str, Any] = json.loads(results.read_text())
        return found


def coming_figures(quick: bool, mbits: float) -> Iterator[Figure]:
    rounds, segment = (4, 2) if quick else (12, 3)
    link = f"{mbits:g} Mbit/s" if mbits else "loopback"
    for zero in (1, 2):
        if mbits:
            found = on_hosts(zero, rounds, segment, mbits)
        else:
            outcome = run_ranks(partial(coming, zero, rounds, segment), 2)
            assert outcome.result is not None, outcome.failures
            found = outcome.result
        pairs = [*zip(found["comes"], found["waits"], strict=True)]
        ratios = [statistics.median(comes[kind] / waits[kind] for comes, waits in pairs) for kind in (0, 1)]
        steps, told = rounds * segment, found["told"]
        note = (
            f"{statistics.median(c[0] for c, _ in pairs) / segment:.2f} s to "
            f"{statistics.median(w[0] for _, w in pairs) / segment:.2f} s a step; {found['buckets']} buckets; stood "
            f"waiting {told['comes'][1] / steps:.3f} s to {told['waits'][1] / steps:.3f} s a step"
        )
        yield Figure(f"fsdp=2,zero={zero}, {link}: step to one that waits", ratios[0], None, note)
        yield Figure(f"fsdp=2,zero={zero}, {link}: its processor time", ratios[1], None, f"{rounds} pairs of {segment}")


def bucket_figures(quick: bool) -> Iterator[Figure]:
    rounds = 5 if quick else 20
    for ranks in (2, 4):
        outcome = run_ranks(partial(sizes, rounds), ranks)
        assert outcome.result is not None, outcome.failures
        usual = outcome.result[SIZES.index(25)]
        for size, found in zip(SIZES, outcome.result, strict=True):
            seconds, busy = (
                statistics.median(one[kind] / other[kind] for one, other in zip(found, usual, strict=True))
                for kind in (0, 1)
            )
            note = f"processor time {busy:.3f} of it; {statistics.median(one[0] for one in found):.2f} s a step"
            yield Figure(f"dp={ranks}, buckets of {size} MiB: step to 25 MiB's", seconds, None, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a rough answer")
    parser.add_argument("--only", choices=["coming", "buckets"])
    parser.add_argument("--mbits", type=float, default=0, help="of each host's link; 0: this machine's loopback")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        *words, results = json.loads(options.rank_of)
        torch.set_num_threads(1)
        found = coming(*words)
        if os.environ["RANK"] == "0":
            Path(results).write_text(json.dumps(found))
        return
    figures = list(coming_figures(options.quick, options.mbits)) if options.only != "buckets" else []
    report(figures + (list(bucket_figures(options.quick)) if options.only != "coming" else []))


if __name__ == "__main__":
    main()
