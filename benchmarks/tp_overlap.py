"""Tensor parallelism over a slow link, which computes while it sums, or after.

    python benchmarks/tp_overlap.py [--quick] [--mbits 1000 300 100] [--round-trip 0] [--rounds 6]

``after``: nothing is computed while ranks sum. ``gradients``: weights' gradients, while gradients of inputs are summed.
``chunks``: also row-parallel linears' next tokens, while the sum of those before is under way.

Two hosts are network namespaces (needs root, ``ip`` and ``tc``), a rank on each, ``tp=2``: the link carries what they
send while they compute. All ways run in the same processes and take turns, step by step; ratios are of medians, and
below 1 faster than ``after``. ``--mbits 0``: a link that is not shaped, so that both ranks' processors have to copy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from tests.hosts import missing

import phalanx
from phalanx.launch.environment import Environment
from phalanx.parallel.axes import overlap
from phalanx.recipes.gpt import GPT
from report import Figure, report
from slow_network import SlowNetwork, wait_for

SHAPE = {"width": 512, "layers": 4, "heads": 8, "kv_heads": 8, "length": 256, "megabytes": 2.0, "global_batch": 4}
NEVER = 1 << 62
WAYS = {"after": (NEVER, NEVER), "gradients": (0, NEVER), "chunks": (0, overlap.CHUNK_BYTES)}
"""By name, from how many bytes on weights' gradients do not wait for a sum, and tokens are a chunk."""


def on_rank(words: dict[str, Any]) -> None:
    """What each rank does."""
    torch.set_num_threads(1)
    environment = Environment.detect()
    environment.join(torch.device("cpu"), timedelta(minutes=10))
    found: dict[str, Any] = {way: {"seconds": [], "exposed": [], "overlapped": []} for way in WAYS}
    with phalanx.Engine(GPT(**SHAPE, steps=1000), "tp=2", device="cpu", timeout=timedelta(minutes=5)) as engine:
        batches = engine.batches()
        for number in range(1 + words["rounds"]):
            for way, least in WAYS.items():
                overlap.LEAST_BYTES, overlap.CHUNK_BYTES = least
                dist.barrier()
                began = time.perf_counter()
                metrics = engine.step(next(batches))
                if number:
                    found[way]["seconds"].append(time.perf_counter() - began)
                    for kind in ("exposed", "overlapped"):
                        found[way][kind].append(metrics.communication[f"{kind}_tp"])
        dist.barrier()
    if environment.rank == 0:
        Path(words["results"]).write_text(json.dumps(found))
    environment.leave()


def run_hosts(mbits: float, round_trip: float, rounds: int) -> dict[str, Any]:
    """What all ways took on hosts that are made for it."""
    with tempfile.TemporaryDirectory() as folder, SlowNetwork(2, Path(folder), mbits, round_trip) as network:
        results = Path(folder) / "results.json"
        words = {"rounds": rounds, "results": str(results)}
        with network.ranks(__file__, words) as ranks:
            wait_for(ranks)
        found: dict[str, Any] = json.loads(results.read_text())
        return found


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    for mbits in options.mbits:
        found = run_hosts(mbits, options.round_trip, options.rounds)
        usual = {way: {kind: 1e3 * statistics.median(of) for kind, of in kinds.items()} for way, kinds in found.items()}
        before, link = usual["after"], f"{mbits:g} Mbit/s" if mbits else "an unshaped link"
        for way in list(WAYS)[1:]:
            own = usual[way]
            note = (
                f"{own['seconds']:.0f} ms for {before['seconds']:.0f}; of tp exposed {own['exposed']:.0f} for "
                f"{before['exposed']:.0f}, overlapped {own['overlapped']:.0f} for {before['overlapped']:.0f}"
            )
            yield Figure(f"{way}: step to after's, {link}", own["seconds"] / before["seconds"], None, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbits", type=float, nargs="+", default=[1000, 300, 100])
    parser.add_argument("--round-trip", type=float, default=0.0, help="seconds")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="one link, few steps")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        on_rank(json.loads(options.rank_of))
        return
    if missing():
        sys.exit(f"not run: {missing()}")
    if options.quick:
        options.mbits, options.rounds = [300], 3
    report(list(figures(options)))


if __name__ == "__main__":
    main()
