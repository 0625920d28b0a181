"""Ranks that share hosts: bytes that leave a host in a step, with collectives inside of hosts first and without.

    python benchmarks/host_sums.py [--layout dp|fsdp] [--quick] [--hosts 2] [--ranks 2] [--mbits 100] [--steps 3]

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
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Contestant:
    """A way to train, and what its bytes are compared with."""

    name: str
    layout: str
    knows: bool
    """Whether ranks know which of them share a host."""
    like: str = ""
    fewer: float = 1.0
    """Of its like's bytes, by arithmetic, so much leaves a host."""


def replicas(hosts: int, each: int) -> Iterator[Contestant]:
    ranks = hosts * each
    ring, straight = (1 - 1 / hosts) / (1 - 1 / ranks), 2 / (1 + each)
    dp, inside = f"dp={ranks}", f"dp={hosts},fsdp={each},zero=2,comm=int4"
    yield Contestant("one ring", dp, False)
    yield Contestant("hosts first", dp, True, "one ring", ring)
    if ranks & (ranks - 1) == 0:
        yield Contestant("exact, straight", f"{dp},exact={ranks}", False)
        yield Contestant("exact, hosts first", f"{dp},exact={ranks}", True, "exact, straight", 1 / each)
    yield Contestant("int4, straight", f"{dp},comm=int4", False)
    yield Contestant("int4", f"{dp},comm=int4", True, "int4, straight", (1 + 1 / each) / 2)
    yield Contestant(f"int4 as {inside}", inside, True, "int4", straight)


def shards(hosts: int, each: int) -> Iterator[Contestant]:
    ranks = hosts * each
    kinds = {"zero=2": 1 / each, "zero=3": 1 / each, "zero=3,comm=int4": (1 + 1 / each) / 2}
    if ranks & (ranks - 1) == 0:
        kinds |= {f"zero=3,exact={ranks}": 1 / each}
    for kind, fewer in kinds.items():
        yield Contestant(f"{kind}, straight", f"fsdp={ranks},{kind}", False)
        yield Contestant(kind, f"fsdp={ranks},{kind}", True, f"{kind}, straight", fewer)


LAYOUTS = {"dp": replicas, "fsdp": shards}


def on_rank(words: dict[str, Any]) -> None:
    """What each rank does."""
    torch.set_num_threads(1)
    environment = Environment.detect()
    environment.join(torch.device("cpu"), timedelta(minutes=10))
    task = GPT(**SHAPE, global_batch=A_RANK * environment.world, steps=100)
    found = {}
    for one in LAYOUTS[words["layout"]](words["hosts"], words["ranks"]):
        os.environ["LOCAL_WORLD_SIZE"] = str(words["ranks"] if one.knows else environment.world)
        with phalanx.Engine(task, one.layout, device="cpu", timeout=timedelta(minutes=5)) as engine:
            seconds, sent, batches = list[float](), list[int](), engine.batches()
            for _ in range(words["steps"] + 1):
                dist.barrier()
                before, began = bytes_sent(), time.perf_counter()
                engine.step(next(batches))
                engine.spread.settle()  # whole weights, which would come while the next step begins
                seconds.append(time.perf_counter() - began)
                dist.barrier()
                sent.append(bytes_sent() - before)
            found[one.name] = {"seconds": statistics.median(seconds[1:]), "bytes": statistics.median(sent[1:])}
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
        told = {name: getattr(options, name) for name in ("layout", "hosts", "ranks", "steps")}
        words = told | {"results": str(results)}
        with network.ranks(__file__, words, options.ranks) as ranks:
            wait_for(ranks)
        found: dict[str, dict[str, float]] = json.loads(results.read_text())
        return found


def figures(options: argparse.Namespace, found: dict[str, dict[str, float]]) -> Iterator[Figure]:
    """Each beside its like that does not go inside of hosts first: what leaves a host, and a step's time."""
    for one in LAYOUTS[options.layout](options.hosts, options.ranks):
        own, like = found[one.name], found.get(one.like)
        note = f"{1e3 * own['seconds']:.0f} ms a step, {own['bytes'] / 1e6:.3g} MB from a host"
        if like is None:
            yield Figure(f"{one.name}: MB from a host, {options.mbits:g} Mbit/s", own["bytes"] / 1e6, None, note)
            continue
        yield Figure(f"{one.name}: bytes to those of {one.like}", own["bytes"] / like["bytes"], 1.05 * one.fewer, note)
        yield Figure(f"{one.name}: step to that of {one.like}", own["seconds"] / like["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=LAYOUTS, default="dp", help="what is spread over all ranks")
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
