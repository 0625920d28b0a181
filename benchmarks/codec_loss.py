"""What few bits cost in loss: of held-out text, after training with each codec from several seeds.

    python benchmarks/codec_loss.py [COMM ...] [--steps 2000] [--seeds 3] [--axis dp|fsdp] [--shape small|links]
        [--length 96] [--together 1] [--quick]

A small language model on two ranks (``--shape links``: that of `links.py`, of 10 million weights), the same samples in
the same order as without a codec. One run's loss differs from another's by a percent whatever is sent, so a codec is
held against that: the difference of the means over seeds, in units of how far the seeds of exact training lie apart.
`int4`, which owes what it does not say, has a bar: one. Over ``fsdp`` weights are gathered in few bits, too.
``--together``: so many runs at a time, two ranks each.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

import links
import phalanx
from phalanx.launch.forkserver import ForkServer
from phalanx.launch.pool import Pool
from phalanx.recipes.gpt import GPT
from report import Figure, report

RANKS = 2
SHAPES: dict[str, dict[str, Any]] = {
    "small": {"width": 128, "layers": 3, "kv_heads": 4, "length": 96, "global_batch": 16},
    "links": links.SHAPE | {"global_batch": RANKS * links.A_RANK},
}
BARRED = "int4"


def loss(task: GPT, layout: str) -> float:
    """Of held-out text, on each rank alike."""
    torch.set_num_threads(1)
    with phalanx.Engine(task, layout, device="cpu") as engine:
        for batch in engine.batches():
            engine.step(batch)
        return engine.evaluate()["loss"]


def trained(shape: dict[str, Any], axis: str, run: tuple[str, int]) -> float:
    """The loss of a method and a seed, by ranks of their own."""
    comm, seed = run
    with ForkServer() as server, closing(Pool(server, RANKS, timedelta(minutes=5))) as pool:
        pool.patience = None
        answers = pool.ask(RANKS, loss, GPT(**shape, seed=seed), f"{axis}={RANKS},comm={comm}")
    for answer in answers:
        if answer.failed:
            raise SystemExit(f"comm={comm}, seed {seed}: {answer.trace or 'a rank is gone'}")
    print(f"{comm:<12} seed {seed}  {answers[0].value:.4f}", flush=True)
    value: float = answers[0].value
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comm", nargs="*", default=[BARRED], metavar="COMM", help="methods beside exact")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--axis", choices=["dp", "fsdp"], default="dp")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--length", type=int, help="bytes of a sequence, where other than the shape's")
    parser.add_argument("--together", type=int, default=1, help="runs at a time")
    parser.add_argument("--quick", action="store_true", help="2 seeds, 60 steps")
    options = parser.parse_args()
    steps, seeds = (60, 2) if options.quick else (options.steps, options.seeds)
    shape = SHAPES[options.shape] | {"steps": steps} | ({"length": options.length} if options.length else {})
    runs = [(comm, seed) for comm in ["exact", *options.comm] for seed in range(seeds)]
    with ThreadPoolExecutor(options.together) as threads:
        losses = list(threads.map(partial(trained, shape, options.axis), runs))
    found: dict[str, list[float]] = {}
    for (comm, _), value in zip(runs, losses, strict=True):
        found.setdefault(comm, []).append(value)
    exact = found.pop("exact")
    apart = max(exact) - min(exact)
    figures = [Figure("exact: how far seeds lie apart", apart, note=", ".join(f"{value:.4f}" for value in exact))]
    for comm, losses in found.items():
        more = statistics.mean(losses) - statistics.mean(exact)
        note = f"{', '.join(f'{value:.4f}' for value in losses)}: {more / statistics.mean(exact):+.2%}"
        figures.append(Figure(f"{comm}: more loss, in that unit", more / apart, 1.0 if comm == BARRED else None, note))
    report(figures)


if __name__ == "__main__":
    main()
