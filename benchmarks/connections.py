"""Whether several connections carry more than one over slow links, of large exchanges or sums between hosts.

    python benchmarks/connections.py [--quick] [--mbits 100] [--round-trip 0.05] [--megabytes 4] [--buckets 4]
        [--hosts 3] [--what exchange] [--loss 0.001] [--congestion reno]

Hosts, network namespaces joined by links of the given rate (needs root, ``ip`` and ``tc``), give each other so many
buckets, all at once and both ways at once (`parallel.communication.peers`): in turns over groups of gloo's, each
bucket over one, or each in parts over all of them, as `Peers.connect` has it. Sums are gloo's own, and those of
`host_sums` over so many groups. Each contestant has a few exchanges in a row, with a pause before each as steps have
one in which they compute; the first is not timed. A connection that was silent for longer begins slowly again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from tests.hosts import missing
from torch import Tensor

from phalanx.launch.environment import Environment
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.peers import Peers
from phalanx.parallel.communication.traffic import Traffic
from report import Figure, report
from slow_network import SlowNetwork, wait_for

GROUPS = (1, 2, 4)
IN_A_ROW = 3
PAUSE = 0.3
"""Seconds."""
Exchange = Callable[[Tensor, Tensor], list[Any]]
"""Of what is to come into and go out of a host, buckets by ranks by bytes: what is to be waited for."""


def in_turns(peers: list[Peers]) -> Exchange:
    def begun(into: Tensor, out: Tensor) -> list[Any]:
        expected = [peers[number % len(peers)].expect(rows) for number, rows in enumerate(into)]
        return [work for one, rows in zip(expected, out, strict=True) for work in one.send(rows)]

    return begun


def summed(group: dist.ProcessGroup, more: list[dist.ProcessGroup] | None) -> Exchange:
    """``more``: further groups, none of them if that is gloo's own sum."""
    made = Communicator(group, Traffic(), "dp", range(group.size()))
    if more is not None:
        made.connect(more)
    return lambda into, out: [made.all_reduce(rows.view(-1).view(torch.float32)) for rows in into]


def contestants(hosts: Sequence[int]) -> dict[str, Exchange]:
    """By name; each has groups of its own."""

    def groups(many: int) -> list[dist.ProcessGroup]:
        return [dist.new_group(hosts) for _ in range(many)]

    found: dict[str, Exchange] = {}
    for many in GROUPS:
        found[f"exchange, {many} in turns"] = in_turns([Peers(group, hosts) for group in groups(many)])
    for many in GROUPS[1:]:
        first, *more = groups(many)
        peers = Peers(first, hosts)
        peers.connect(more)
        found[f"exchange, parts over {many}"] = in_turns([peers])
    found["sum, gloo's"] = summed(groups(1)[0], None)
    for many in GROUPS if len(hosts) == 2 else ():
        first, *more = groups(many)
        found[f"sum, parts over {many}"] = summed(first, more)
    return found


def on_rank(words: dict[str, Any]) -> None:
    """What each host does."""
    torch.set_num_threads(1)
    environment = Environment.detect()
    environment.join(torch.device("cpu"), timedelta(minutes=5))
    hosts = range(environment.world)
    out, into = torch.zeros(2, words["buckets"], len(hosts), int(words["megabytes"] * (1 << 20)), dtype=torch.uint8)
    chosen = {name: begin for name, begin in contestants(hosts).items() if name.startswith(words["what"])}
    taken: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in range(words["turns"]):
        for name, begin in chosen.items():
            for number in range(1 + IN_A_ROW):
                dist.barrier()
                time.sleep(PAUSE)
                began = time.perf_counter()
                for work in begin(into, out):
                    work.wait()
                if number:
                    taken[name].append(time.perf_counter() - began)
    if environment.rank == 0:
        Path(words["results"]).write_text(json.dumps(taken))
    dist.barrier()
    environment.leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one turn")
    parser.add_argument("--mbits", type=float, default=100)
    parser.add_argument("--round-trip", type=float, default=0, help="seconds")
    parser.add_argument("--megabytes", type=float, default=4, help="of a bucket, to each rank")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--what", default="", help="what the names of contestants begin with")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--loss", type=float, default=0, help="share of frames, on a link with a round trip")
    parser.add_argument("--congestion", default="", help="TCP's algorithm; this machine's own if none is given")
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
        SlowNetwork(
            options.hosts, Path(folder), options.mbits, options.round_trip, options.loss, options.congestion
        ) as network,
    ):
        words = {
            "megabytes": options.megabytes,
            "buckets": options.buckets,
            "turns": 1 if options.quick else options.turns,
        }
        words |= {"what": options.what, "results": f"{folder}/results.json"}
        with network.ranks(__file__, words) as ranks:
            wait_for(ranks)
        taken: dict[str, list[float]] = json.loads(Path(words["results"]).read_text())
    bits = 8 * options.buckets * options.megabytes * (1 << 20) * (options.hosts - 1)
    link = f"{options.mbits:g} Mbit/s" + (f", {1e3 * options.round_trip:g} ms" if options.round_trip else "")
    link += f", {options.loss:.2%} lost" if options.loss else ""
    first: dict[str, float] = {}
    figures = []
    for name, found in taken.items():
        kind, seconds = name.partition(",")[0], statistics.median(found)
        ratio = seconds / first.setdefault(kind, seconds)
        rate, best = ((2 if kind == "sum" else 1) * bits / 1e6 / each for each in (seconds, min(found)))
        figures.append(
            Figure(f"{name}: seconds to the first's, {link}", ratio, None, f"{rate:.1f} Mbit/s, at best {best:.1f}")
        )
    report(figures)


if __name__ == "__main__":
    main()
