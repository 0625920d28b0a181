"""What a rank does by itself in a world of 1,024 and of 10,240 ranks, at the shapes of models of 70B and 405B weights.

    python benchmarks/scale.py [--quick] [--only groups|neighbours|placing|start|step|manifest|rendezvous server]

One rank is alone in this process, and all others are there in name (`simulated.py`): its code runs unchanged, and what
is measured is the processor time it takes. Work that every rank must do may grow with the world, but no faster: a
figure "grows by" is the exponent between the two worlds, 1 where ten times the ranks are ten times the work.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

import phalanx
import simulated
from phalanx.anatomy import Anatomy
from phalanx.checkpoint.manifest import Chunk, Held, Manifest
from phalanx.checkpoint.state import State
from phalanx.checkpoint.write import CHUNK_BYTES
from phalanx.data import Arrays
from phalanx.data.loader import Loader
from phalanx.data.order import Order
from phalanx.launch.environment import Environment
from phalanx.layout import Layout
from phalanx.models.transformer import Transformer, TransformerConfig
from phalanx.parallel.communication.mesh import Mesh
from phalanx.parallel.communication.traffic import Traffic
from phalanx.parallel.weights.blueprint import Blueprint
from phalanx.parallel.weights.boxes import Box
from phalanx.parallel.weights.placement import Placement
from phalanx.train.agreement import check_agreement
from phalanx.train.neighbours import Neighbours, guests_of, holder_of
from phalanx.train.placing import hosts_used
from report import Figure, report

WORLDS = 1024, 10_240
HOST = 8
FLOOR = 0.01
"""Seconds that are not worth a fit."""
LINEAR = 1.1
LAYOUTS = {
    "fsdp,tp,pp": ("fsdp=16,tp=8,pp=8", "fsdp=160,tp=8,pp=8"),
    "dp,fsdp,tp": ("fsdp=128,tp=8", "dp=10,fsdp=128,tp=8"),
    "fsdp": ("fsdp=1024", "fsdp=10240"),
    "dp,fsdp,cp": ("dp=16,fsdp=16,cp=4", "dp=160,fsdp=16,cp=4"),
}
STARTS = ("70B", "fsdp=128,tp=8"), ("70B", "fsdp=160,tp=8,pp=8"), ("70B", "fsdp=1280,tp=8"), ("405B", "fsdp=1280,tp=8")
SHAPES = {
    "70B": {"vocabulary": 128_256, "width": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "hidden": 28_672},
    "405B": {"vocabulary": 128_256, "width": 16_384, "layers": 126, "heads": 128, "kv_heads": 8, "hidden": 53_248},
}
SMALL = {"vocabulary": 512, "width": 128, "heads": 16, "kv_heads": 8, "hidden": 256}
"""Of which a step takes next to no time to compute: what is left is Python."""


@dataclass
class Model(phalanx.Task):
    """A language model of any shape on empty text."""

    shape: str = "70B"
    layers: int = 0
    """Of small ones, so many, instead of that shape."""

    def config(self) -> dict[str, Any]:
        return SMALL | {"layers": self.layers} if self.layers else SHAPES[self.shape]

    def model(self) -> Transformer:
        return Transformer(TransformerConfig(**self.config()))

    def data(self) -> Arrays:
        return Arrays(tokens=torch.zeros(1 << 16, 17, dtype=torch.int64))

    def inputs(self, batch: dict[str, Any]) -> torch.Tensor:
        return batch["tokens"][:, :-1]

    def loss(self, output: Any, batch: dict[str, Any]) -> phalanx.Loss:
        return phalanx.losses.cross_entropy(output, batch["tokens"][:, 1:])


def seconds(work: Callable[[], Any], times: int = 1) -> float:
    """Processor time, the least of some runs."""
    found = []
    for _ in range(times):
        started = time.process_time()
        work()
        found.append(time.process_time() - started)
    return min(found)


def growth(name: str, took: tuple[float, float]) -> Iterator[Figure]:
    """Seconds at the larger world, and how they grow."""
    small, large = (max(FLOOR, t) for t in took)
    exponent = math.log(large / small, WORLDS[1] / WORLDS[0])
    note = f"{took[0] * 1e3:.1f} ms at {WORLDS[0]:,} ranks, {took[1] * 1e3:.1f} ms at {WORLDS[1]:,}"
    yield Figure(f"{name}, grows by", exponent, LINEAR, note)


def groups(quick: bool) -> Iterator[Figure]:
    for name, layouts in LAYOUTS.items():
        took, made = [], []
        for text in layouts:
            layout = Layout.parse(text)
            with simulated.rank_of(layout.world, layout.world - 3):
                took.append(seconds(lambda layout=layout: Mesh(layout, layout.world - 3, timedelta(seconds=60))))
                made.append(len(simulated.joined))
        yield from growth(f"process groups, {name}", (took[0], took[1]))
        yield Figure(f"process groups that a rank is in, {name}", made[1], 24)
    layout = Layout.parse(LAYOUTS["fsdp"][1])
    with simulated.rank_of(layout.world, 7):
        mesh = Mesh(layout, 7, timedelta(seconds=60))
        each = seconds(lambda: [mesh.index("fsdp", "cp") for _ in range(1000)]) / 1000
        yield Figure("a rank's index along an axis, us", each * 1e6, 2, "asked several times a weight and step")


def neighbours(quick: bool) -> Iterator[Figure]:
    took = []
    for world in WORLDS:
        with simulated.rank_of(world, world - 3, HOST):
            engine: Any = type("Rank", (), {})()
            engine.environment, engine.timeout = Environment.detect(), timedelta(seconds=60)

            def find(world: int = world, engine: Any = engine) -> None:
                holder_of(engine.environment.hosts, world - 3)
                guests_of(engine.environment.hosts, world - 3)
                Neighbours(engine, [])

            took.append(seconds(find))
            links = sum(size - 1 for size in simulated.joined)
    yield from growth("neighbours", (took[0], took[1]))
    yield Figure("connections of a rank to its neighbours", links, 2)


def placing(quick: bool) -> Iterator[Figure]:
    layout = Layout(fsdp=16, tp=8, pp=8)
    for name, work in {
        "nearest layouts": lambda world: layout.fitted(1 << 14, world),
        "refusal of a layout, with the nearest that works": lambda world: layout._nearest(HOST, world - 1),
        "hosts that a layout uses": lambda world: hosts_used(layout, 1 << 14, [HOST] * (world // HOST - 1)),
        "hosts that a layout uses, of which few fit": lambda world: hosts_used(layout, HOST, [HOST] * (world // HOST)),
        "a rank's part of a step's samples": lambda world: _samples(world),
        "agreement between ranks": _agreement,
    }.items():
        small, large = (seconds(lambda work=work, world=world: work(world)) for world in WORLDS)
        yield from growth(name, (small, large))


def _samples(world: int) -> None:
    order = Order(1 << 30, 4 * world, 0)
    loader = Loader(range(1 << 30), list, order, micro_batches=4, ranks=world, rank=world - 3)
    loader.plans(7, order.ids(7))


def _agreement(world: int) -> None:
    with simulated.rank_of(world, world - 3):
        engine: Any = type("Rank", (), {})()
        engine.task, engine.environment, engine.device = Model(), Environment.detect(), torch.device("cpu")
        engine.layout, engine.traffic = Layout(dp=world), Traffic()
        check_agreement(engine, "settings", "layout", "kernels")


@contextmanager
def rank_of(layout: Layout) -> Iterator[None]:
    """A rank in the middle, which has rows of most weights."""
    with simulated.rank_of(layout.world, layout.world // 2 + HOST + 1, HOST):
        yield


def start(quick: bool) -> Iterator[Figure]:
    """From nothing to an engine and a list of what it would save."""
    Blueprint(Model(layers=2).model, 0)  # what is imported at the first use
    for shape, text in STARTS[1:2] if quick else STARTS:
        described = seconds(lambda shape=shape: _described(Model(shape=shape)))
        layout = Layout.parse(text)
        with rank_of(layout):
            started = time.process_time()
            engine = _engine(Model(shape=shape, global_batch=layout.batch_ranks), layout)
            held = sum(weight.shard.numel() for weight in engine.spread.weights.values())
            made = time.process_time()
            entries = sum(1 for _ in State(engine.spread, engine.optimizer, engine.environment.hosts).entries())
            ended = time.process_time()
            engine.close()
        note = f"the model described and checked {described:.1f} s, {held / 1e6:.0f}M weights drawn, {entries} boxes "
        note += f"{ended - made:.2f} s"
        yield Figure(f"start of a rank of {layout.world:,}, {shape}, {layout}, s", ended - started, 5, note)


def _described(task: Model) -> None:
    model = Blueprint(task.model, 0).model
    Placement.of(model, Anatomy.of(model), Layout.parse("fsdp=16,tp=8,pp=8"))


def _engine(task: Model, layout: Layout) -> phalanx.Engine:
    engine = phalanx.Engine(task, layout, device="cpu")
    engine.spread.probe.untried.clear()  # an echo's blocks are not those of one device
    return engine


def step(quick: bool) -> Iterator[Figure]:
    """Python of a step: what it takes beyond a plain loop over the same small weights."""
    layers = SHAPES["70B"]["layers"]
    plain = _plain_step(layers)
    for kind, layouts in {
        "fsdp,tp": ("fsdp=128,tp=8", "dp=10,fsdp=128,tp=8"),
        "fsdp": ("fsdp=1024", "dp=10,fsdp=1024"),
        "zero=1,tp": ("fsdp=128,tp=8,zero=1", "dp=10,fsdp=128,tp=8,zero=1"),
    }.items():
        if quick and kind != "fsdp,tp":
            continue
        took = []
        for text in layouts:
            layout = Layout.parse(text)
            with rank_of(layout):
                engine = _engine(Model(layers=layers, global_batch=layout.batch_ranks), layout)
                batches = engine.batches()
                for _ in range(2):
                    engine.step(next(batches))
                runs = [seconds(lambda engine=engine, batches=batches: engine.step(next(batches))) for _ in range(5)]
                took.append(statistics.median(runs) - plain)
                engine.close()
        yield from growth(f"Python of a step, {layers} layers, {kind}", (took[0], took[1]))
        yield Figure(
            f"Python of a step, {layers} layers, {kind}, s", took[1], 0.5, f"beyond a plain loop's {plain:.2f} s"
        )


def _plain_step(layers: int) -> float:
    task = Model(layers=layers)
    model = task.model()
    optimizer = task.optimizer(list(model.parameters()))
    tokens = {"tokens": torch.zeros(1, 17, dtype=torch.int64)}

    def once() -> None:
        loss = task.loss(model(task.inputs(tokens)), tokens)
        loss.total.backward()
        optimizer.step()
        optimizer.zero_grad()

    return statistics.median(seconds(once) for _ in range(7))


def manifest(quick: bool) -> Iterator[Figure]:
    """A rank's share of what a checkpoint says of itself: made, written as text and read again."""
    for shape in SHAPES:
        for text in LAYOUTS["fsdp,tp,pp"]:
            layout = Layout.parse(text)
            share = _share(shape, layout)
            chunks = sum(len(held.chunks) for held in share.tensors.values())
            took = seconds(lambda share=share: Manifest.parse(share.to_json(), "memory"), 3)
            yield Figure(f"manifest of {shape}, a rank's share, {layout.world:,} ranks, s", took, 1, f"{chunks} chunks")


def _share(shape: str, layout: Layout) -> Manifest:
    """Weights and moments of one rank of a stage."""
    model = Blueprint(Model(shape=shape).model, 0).model
    tensors: dict[str, Held] = {}
    for name, weight in model.named_parameters():
        block = name.split(".")[1] if name.startswith("blocks.") else "0"
        if int(block) >= -(-SHAPES[shape]["layers"] // layout.pp):
            continue
        rows = -(-len(weight) // (layout.fsdp * layout.tp))
        rest = tuple(weight.shape[1:])
        each = max(1, CHUNK_BYTES // (4 * math.prod(rest)))
        for kind in ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
            full = f"{kind}/{name}"
            boxes = [Box((a, *(0 for _ in rest)), (min(each, rows - a), *rest)) for a in range(0, rows, each)]
            chunks = [Chunk(full, box, "part-00007.safetensors", 0, 4 * math.prod(box.sizes), 7) for box in boxes]
            tensors[full] = Held("float32", tuple(weight.shape), 7, chunks)
    return Manifest({"step": 1}, tensors)


def rendezvous_server(quick: bool) -> Iterator[Figure]:
    if find_spec("scale_rendezvous") is not None:
        from scale_rendezvous import figures  # type: ignore[import-not-found]

        yield from figures(rounds=3, seconds=3.0) if quick else figures()


def main() -> None:
    parts = {f.__name__: f for f in (groups, neighbours, placing, start, step, manifest, rendezvous_server)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a rough answer in under a minute")
    parser.add_argument("--only", choices=list(parts))
    options = parser.parse_args()
    torch.set_num_threads(1)
    report([figure for name, part in parts.items() if options.only in (None, name) for figure in part(options.quick)])


if __name__ == "__main__":
    main()
