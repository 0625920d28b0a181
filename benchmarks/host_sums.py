"""Replicas that share hosts: bytes that leave a host in a step, with sums inside of hosts first and without.

    python benchmarks/host_sums.py [--quick] [--hosts 2] [--ranks 2] [--mbits 100] [--steps 3]

Hosts are network namespaces joined by a link of the given rate (needs root, ``ip`` and ``tc``), with several ranks on
each. What ranks of one host say to each other does not pass its link. Contestants are in the same processes, one after
another; those that know nothing of hosts are told that all ranks are on one. Bytes are the link's own count.
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
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from tests.hosts import missing

import phalanx
from links import A_RANK, SHAPE
from phalanx.launch.environment import Environment
from phalanx.recipes.gpt import GPT
from report import Figure, report
from slow_network import SlowNetwork, bytes_sent, wait_for


def contestants(hosts: int, each: int) -> dict[str, tuple[str, bool]]:
    """By name: a layout, and whether ranks know which of them share a host."""
    dp = f"dp={hosts * each}"
    found = {"one ring": (dp, False), "hosts first": (dp, True)}
    ranks = hosts * each
    if ranks & (ranks - 1) == 0:
        found |= {
            "exact, straight": (f"{dp},exact={ranks}", False),
            "exact, hosts first": (f"{dp},exact={ranks}", True),
        }
    inside = f"dp={hosts},fsdp={each},zero=2,comm=int4"
    return found | {"int4": (f"{dp},comm=int4", True), f"int4 as {inside}": (inside, True)}


def on_rank(words: dict[str, Any]) -> None:
    """What each rank does."""
    torch.set_num_threads(1)
    environment = Environment.detect()
    environment.join(torch.device("cpu"), timedelta(minutes=10))
    task = GPT(**SHAPE, global_batch=A_RANK * environment.world, steps=100)
    found = {}
    for name, (layout, knows) in contestants(words["hosts"], words["ranks"]).items():
        os.environ["LOCAL_WORLD_SIZE"] = str(words["ranks"] if knows else environment.world)
        with phalanx.Engine(task, layout, device="cpu", timeout=timedelta(minutes=5)) as engine:
            seconds, sent, batches = list[float](), list[int](), engine.batches()
            for _ in range(words["steps"] + 1):
                dist.barrier()
                before, began = bytes_sent(), time.perf_counter()
                engine.step(next(batches))
                seconds.append(time.perf_counter() - began)
                dist.barrier()
                sent.append(bytes_sent() - before)
            found[name] = {"seconds": statistics.median(seconds[1:]), "bytes": statistics.median(sent[1:])}
            del batches
    if environment.rank == 0:
        Path(words["results"]).write_text(json.dumps(found))
    dist.barrier()
    environment.leave()


def run_hosts(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """What each contestant's step took and sent, on hosts that are made for it."""
    with (
        tempfile.TemporaryDirectory() as folder,
        SlowNetwork(options.hosts, Path(folder), options.mbits) as network,
    ):
        results = Path(folder) / "results.json"
        words = {name: getattr(options, name) for name in ("hosts", "ranks", "steps")} | {"results": str(results)}
        with network.ranks(__file__, words, options.ranks) as ranks:
            wait_for(ranks)
        found: dict[str, dict[str, float]] = json.loads(results.read_text())
        return found


def figures(options: argparse.Namespace, found: dict[str, dict[str, float]]) -> Iterator[Figure]:
    """Each beside its like that does not go inside of hosts first: what leaves a host, and a step's time."""
    hosts, each = options.hosts, options.ranks
    ring = (1 - 1 / hosts) / (1 - 1 / (hosts * each))
    pairs = {"hosts first": ("one ring", ring), "exact, hosts first": ("exact, straight", 1 / each)}
    pairs |= {name: ("int4", 1 / each) for name in found if name.startswith("int4 as")}
    for name, own in found.items():
        note = f"{1e3 * own['seconds']:.0f} ms a step, {own['bytes'] / 1e6:.3g} MB from a host"
        if name not in pairs:
            yield Figure(f"{name}: MB from a host, {options.mbits:g} Mbit/s", own["bytes"] / 1e6, None, note)
            continue
        like, fewer = pairs[name]
        yield Figure(f"{name}: bytes to those of {like}", own["bytes"] / found[like]["bytes"], 1.05 * fewer, note)
        yield Figure(f"{name}: step to that of {like}", own["seconds"] / found[like]["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one step each over an unshaped link")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="on each host")
    parser.add_argument("--mbits", type=float, default=100, help="Mbit/s of each host's link; 0: not shaped")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        on_rank(json.loads(options.rank_of))
        return
    if missing():
        sys.exit(f"not run: {missing()}")
    if options.quick:
        options.steps, options.mbits = 1, 0
    report(list(figures(options, run_hosts(options))))


if __name__ == "__main__":
    main()
