"""``phalanx probe``: how fast this machine is, or several hosts that meet: devices, codecs, links between ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.cluster import Cluster, MeasuredLink
from phalanx.comm import EXACT
from phalanx.comm_methods import CANDIDATES
from phalanx.errors import CannotHere
from phalanx.launch.environment import Environment
from phalanx.launch.supervisor import Host
from phalanx.layout import Layout
from phalanx.parallel.communication import links
from phalanx.parallel.communication.codecs import speed
from phalanx.parallel.communication.codecs.chosen import Coding
from phalanx.parallel.communication.codecs.codec import Codec
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.traffic import Traffic
from phalanx.train.doctor import meet
from phalanx.verdict import Verdict
from phalanx.words import bits

MOST_PAIRS = 16
"""Ranks of which any two are measured; of more, each with the next."""
SIZES = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of matrices, by device."""


@dataclass(frozen=True)
class Probed:
    """What the first rank knows of all."""

    cluster: Cluster
    lines: list[str]


def probe(given: dict[str, Any]) -> Verdict:
    """Measure this machine with so many ranks, or several hosts that meet, each with this command."""
    out: Path | None = given["out"]
    if out is not None and not out.parent.is_dir():
        raise CannotHere(f"{out.parent} is no folder to write {out.name} to. Make it, or name another.")
    met = meet(given, "probe", _measured)
    if (verdict := met.unfinished()) is not None:
        return verdict
    if not isinstance(met.result, Probed):
        return Verdict(True, "measured: the first host says what was found")
    cluster, lines = met.result.cluster, met.result.lines
    if out is not None:
        out.write_text(cluster.to_toml(), encoding="utf-8")
        lines = [*lines, f"written to {out}"]
    return Verdict(True, f"{cluster} measured ({met.seconds:.1f} s)", lines)


def _measured(folder: Path, kind: str, timeout: float, host: Host) -> Probed:
    """What each rank does."""
    environment = Environment.detect()
    device = environment.device(kind)
    with ExitStack() as undo:
        if environment.join(device, timedelta(seconds=timeout)):
            undo.callback(environment.leave)
        world = Communicator(dist.group.WORLD if environment.world > 1 else None, Traffic(), "world")
        codecs = {method.name: _codec_rate(method.name, device) for method in CANDIDATES if method.name != EXACT}
        slowest = torch.tensor([_flops(device), *codecs.values()], dtype=torch.float64, device=device).neg()
        world.all_reduce_max(slowest)
        flops, *rates = slowest.neg().tolist()
        pairs = _pairs(environment, device, world)
        hosts = environment.hosts if environment.world > 1 else [0]
        here = Cluster.here(max(hosts.count(number) for number in set(hosts)), kind)
        same = [pair for pair in pairs if hosts[pair.ranks[0]] == hosts[pair.ranks[1]]]
        apart = [pair for pair in pairs if pair not in same]
        cluster = Cluster(
            here.device, here.per_node, len(set(hosts)), here.memory_bytes, flops,
            dict(zip(codecs, rates, strict=True)), _slowest(same), _slowest(apart),
        )  # fmt: skip
        return Probed(cluster, [*_told(cluster), *(_told_pair(pair) for pair in pairs)])


def _pairs(environment: Environment, device: torch.device, world: Communicator) -> list[links.PairSpeed]:
    """Of first ranks of hosts, and of ranks of the first host; on all ranks alike."""
    if environment.world == 1:
        return []
    hosts = environment.hosts
    firsts = [hosts.index(number) for number in sorted(set(hosts))]
    near = [rank for rank, number in enumerate(hosts) if number == hosts[0]]
    found = []
    for ranks in (near, firsts):
        if len(ranks) > 1:
            found += links.measured_pairs(links.rounds_of(ranks, len(ranks) <= MOST_PAIRS), device)
    said = world.all_gather_words([json.dumps(asdict(pair)) for pair in found])
    return [_read(text) for words in said for text in words]


def _read(text: str) -> links.PairSpeed:
    known = json.loads(text)
    forth, back = ({int(size): rate for size, rate in known[way].items()} for way in ("forth", "back"))
    first, second = known["ranks"]
    return links.PairSpeed((first, second), known["latency"], forth, back, known["both"])


def _slowest(pairs: Sequence[links.PairSpeed]) -> MeasuredLink | None:
    if not pairs:
        return None
    largest = links.SIZES[-1]  # smaller ones may be through before a link is held to its rate
    rate = min(min(pair.forth[largest], pair.back[largest]) for pair in pairs)
    return MeasuredLink(max(pair.latency for pair in pairs), rate, min(pair.both for pair in pairs))


def _flops(device: torch.device) -> float:
    """With float32 on a CPU, with bfloat16 on a GPU."""
    size = SIZES[device.type]
    a, b = torch.randn(2, size, size, device=device, dtype=torch.float32 if device.type == "cpu" else torch.bfloat16)
    torch.mm(a, b)
    return 2.0 * size**3 / speed.timed(lambda: torch.mm(a, b), device, 5)


def _codec_rate(method: str, device: torch.device) -> float:
    """Bytes of float32 a second that are encoded and decoded."""
    coding = Coding.of(Layout(dp=2, comm=method))
    assert coding is not None
    assert isinstance(coding.gradients, Codec)
    return 4.0 * speed.SAMPLE / sum(speed.seconds(coding.gradients, device))


def _told(cluster: Cluster) -> list[str]:
    found = [f"a device computes {cluster.flops / 1e9:,.0f} Gflop/s"]
    rates = ", ".join(f"{name} {rate / 1e9:.2g}" for name, rate in cluster.codecs.items())
    found.append(f"it encodes and decodes GB/s of float32: {rates}")
    for where, link in (("ranks of a host", cluster.within), ("hosts", cluster.between)):
        if link is not None:
            found.append(
                f"between {where} at worst: {1e3 * link.latency:.3g} ms, {bits(link.rate)} one way, "
                f"{bits(link.both)} each way at once"
            )
    return found


def _told_pair(pair: links.PairSpeed) -> str:
    first, second = pair.ranks
    sizes = ", ".join(f"{_size(size)} {bits(rate)}" for size, rate in pair.forth.items())
    back = bits(pair.back[links.SIZES[-1]])
    return f"rank {first} to {second}: {1e3 * pair.latency:.3g} ms; {sizes}; back {back}; both {bits(pair.both)}"


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >> 20 else f"{size >> 10} KiB"
