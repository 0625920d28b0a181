"""Sites that train by themselves: what they send, and the held-out loss after the same samples as one that sends all.

A character model of the standard library (0.13 M weights), two sites of one rank, 16 sequences of 64 bytes a step,
AdamW at 2e-3 with a cosine; what `docs/local_updates.md` says of losses comes from here. Neither bytes nor losses
depend on what else the machine does. One seed may be a percent or two off; the means of three are held to bars.
``--shape links``: the transformer of `links.py`, of 10 million weights, with its batch of each rank, rate and steps.
``--sites``: other than two, and ``--length``: of sequences.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import phalanx
from links import A_RANK, SHAPE
from phalanx.launch.local import run_ranks
from phalanx.recipes.gpt import GPT
from report import Figure, report

METHODS = {
    "exact": None,
    "local:16": None,
    "diloco:16": 1.05,
    "diloco:8": 1.05,
    "diloco:4": 1.05,
    "diloco:4:int4": 1.05,
    "diloco:16:int4:fragments=4:overlap=2": 1.05,
}
"""Each, and how large its loss may be to that of ``exact``, on the mean over seeds."""
SHAPES = {
    "small": {"width": 64, "layers": 2, "heads": 4, "kv_heads": 4, "length": 64, "global_batch": 16, "megabytes": 1.0},
    "links": SHAPE,
}


def train(task: GPT, layout: str) -> tuple[float, float, int]:
    """On a rank: the held-out loss, bytes that it sent to other sites a step, and messages outside of outer steps."""
    with phalanx.Engine(task, layout, device="cpu") as engine:
        local, between = engine.layout.local, 0
        for batch in engine.batches():
            calls = sum(engine.traffic.calls.values())
            engine.step(batch)
            moves = local is None or any(
                local.arriving(engine.step_number + ahead) is not None
                for ahead in (0, local.overlap // 2, local.overlap)
            )
            between += 0 if moves else sum(engine.traffic.calls.values()) - calls
        sent = sum(engine.traffic.sent.values()) / task.steps
        return engine.evaluate()["loss"], sent, between


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, 64 steps, no bars")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--length", type=int, help="bytes of a sequence, where other than the shape's")
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    given = parser.parse_args()
    steps, seeds = (64, 1) if given.quick else (given.steps, given.seeds)
    shape = {"global_batch": A_RANK * given.sites, **SHAPES[given.shape]}
    shape |= {"length": given.length} if given.length else {}
    losses: dict[str, list[float]] = {}
    figures = []
    for comm in given.methods:
        for seed in range(seeds):
            task = GPT(**shape, steps=steps, seed=seed)
            outcome = run_ranks(partial(train, task, f"dp={given.sites},comm={comm}"), given.sites)
            assert outcome.result is not None, outcome.failures
            found = outcome.result
            losses.setdefault(comm, []).append(found[0])
            print(f"{comm:<40} seed {seed}: held-out loss {found[0]:.4f}, {found[1]:,.0f} bytes a step", flush=True)
        bar = METHODS.get(comm) if not given.quick else None
        ratios = [loss / exact for loss, exact in zip(losses[comm], losses.get("exact", losses[comm]), strict=True)]
        each = ", ".join(f"{loss:.4f}" for loss in losses[comm])
        figures.append(Figure(f"{comm}: held-out loss to exact", statistics.mean(ratios), bar, each))
        figures.append(Figure(f"{comm}: bytes a step", found[1]))
        if comm != "exact":
            figures.append(Figure(f"{comm}: messages in other steps", found[2], 0))
    report(figures)


if __name__ == "__main__":
    main()
