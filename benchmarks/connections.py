"""Whether several connections carry more than one over a slow link: large exchanges over one group of gloo's, or more.

    python benchmarks/connections.py [--quick] [--mbits 100] [--round-trip 0.05] [--megabytes 4] [--buckets 4]

Two hosts, network namespaces joined by a link of the given rate (needs root, ``ip`` and ``tc``), give each other so
many buckets, all at once and both ways at once (`parallel.communication.peers`), in turns over the groups.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from tests.hosts import missing

from phalanx.launch.environment import Environment
from phalanx.parallel.communication.peers import Peers
from report import Figure, report
from slow_network import SlowNetwork, wait_for

GROUPS = (1, 2, 4)


def on_rank(words: dict[str, Any]) -> None:
    """What each host does."""
    torch.set_num_threads(1)
    environment = Environment.detect()
    environment.join(torch.device("cpu"), timedelta(minutes=5))
    peers = [Peers(dist.new_group([0, 1])) for _ in range(max(GROUPS))]
    out, into = torch.zeros(2, words["buckets"], 2, words["megabytes"] << 20, dtype=torch.uint8)
    taken: dict[int, list[float]] = {groups: [] for groups in GROUPS}
    for turn in range(1 + words["turns"]):
        for groups in GROUPS:
            dist.barrier()
            began = time.perf_counter()
            expected = [peers[number % groups].expect(rows) for number, rows in enumerate(into)]
            works = [work for one, rows in zip(expected, out, strict=True) for work in one.send(rows)]
            for work in works:
                work.wait()
            dist.barrier()
            if turn:
                taken[groups].append(time.perf_counter() - began)
    if environment.rank == 0:
        Path(words["results"]).write_text(json.dumps({str(n): statistics.median(found) for n, found in taken.items()}))
    dist.barrier()
    environment.leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one turn")
    parser.add_argument("--mbits", type=float, default=100)
    parser.add_argument("--round-trip", type=float, default=0, help="seconds")
    parser.add_argument("--megabytes", type=int, default=4, help="of a bucket")
    parser.add_argument("--buckets", type=int, default=4)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        on_rank(json.loads(options.rank_of))
        return
    if missing():
        sys.exit(f"not run: {missing()}")
    with (
        tempfile.TemporaryDirectory() as folder,
        SlowNetwork(2, Path(folder), options.mbits, options.round_trip) as network,
    ):
        words = {"megabytes": options.megabytes, "buckets": options.buckets, "turns": 1 if options.quick else 5}
        words |= {"results": f"{folder}/results.json"}
        with network.ranks(__file__, words) as ranks:
            wait_for(ranks)
        taken = {int(n): seconds for n, seconds in json.loads(Path(words["results"]).read_text()).items()}
    bits = 8 * options.buckets * (options.megabytes << 20)
    link = f"{options.mbits:g} Mbit/s" + (f", {1e3 * options.round_trip:g} ms" if options.round_trip else "")
    report(
        [
            Figure(f"{n} groups: seconds to those of one, {link}", s / taken[1], None, f"{bits / s / 1e6:.1f} Mbit/s")
            for n, s in taken.items()
        ]
    )


if __name__ == "__main__":
    main()
