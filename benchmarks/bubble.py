"""How long the ranks of a pipeline wait, against (p-1)/(m+p-1) for p ranks and m micro-batches.

On 2 ranks blocks really compute, a rank on each core. On 4 ranks there are not cores enough, so blocks sleep: as long
for a forward as for each half of a backward. Idle is what is left of p times the span from the first action to the end
of the last, when all ranks' own work is taken off, by the steps' own clocks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

import phalanx
from phalanx.launch.local import run_ranks
from phalanx.parallel import spread
from phalanx.recipes.gpt import GPT
from report import Figure

SECONDS = 0.05
BAR = 0.10


class _Nap(Function):
    """Passes on, and takes its time both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        time.sleep(ctx.backward_seconds)
        return gradient, None, None


class Scale(nn.Module):
    """So that the first block's input wants a gradient, as every other's does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Sleeper(nn.Module):
    """A block of one linear that takes ``SECONDS`` forward, for its input's gradient and for its weight's."""

    def __init__(self, split: bool) -> None:
        super().__init__()
        self.linear, self.split = nn.Linear(8, 8, bias=False), split

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight if self.split else _Nap.apply(self.linear.weight, 0.0, SECONDS)
        return nn.functional.linear(_Nap.apply(x, SECONDS, SECONDS), weight)


@dataclass
class Sleepers(phalanx.Task):
    blocks: int = 4
    split: bool = False
    global_batch: int = 8
    steps: int = 4
    x: Tensor = field(default_factory=lambda: torch.randn(64, 8))

    def model(self) -> nn.Module:
        return nn.Sequential(Scale(), *(Sleeper(self.split) for _ in range(self.blocks)))

    def data(self) -> phalanx.data.Arrays:
        return phalanx.data.Arrays(x=self.x)

    def inputs(self, batch: dict[str, Any]) -> Tensor:
        return batch["x"]

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        return phalanx.losses.mean_squared_error(output, torch.zeros_like(output))


def waited(task: phalanx.Task, layout: str) -> float:
    """On a rank: the share of all ranks' time that was idle, the median of steps."""
    torch.set_num_threads(1)
    if isinstance(task, Sleepers) and task.split:
        original = spread.weight_gradient

        def slow(input: Tensor, gradient: Tensor) -> Tensor:
            time.sleep(SECONDS)
            return original(input, gradient)

        spread.weight_gradient = slow
    shares = []
    with phalanx.Engine(task, layout, device="cpu") as engine:
        for batch in engine.batches():
            seconds = engine.step(batch).seconds
            working = sum(seconds.get(name, 0.0) for name in ("forward", "backward", "reduce"))
            own = torch.tensor([working, seconds["wait"] + working], dtype=torch.float64)
            every = [torch.empty_like(own) for _ in range(engine.layout.pp)]
            torch.distributed.all_gather(every, own)
            work, span = torch.stack(every).unbind(1)
            shares.append(1 - float(work.sum() / (len(every) * span.max())))
    return statistics.median(shares[1:])


def figures(quick: bool) -> Iterator[Figure]:
    steps = 5 if quick else 10
    measured: dict[tuple[int, int, str], float] = {}
    for ranks, micro_batches, schedule in (
        (2, 8, "1f1b"), (2, 8, "zb"), (2, 4, "1f1b"), (2, 4, "zb"),
        (4, 8, "1f1b"), (4, 8, "gpipe"), (4, 8, "interleaved"), (4, 8, "zb"), (4, 16, "1f1b"), (4, 16, "zb"),
    ):  # fmt: skip
        task: phalanx.Task
        if ranks == 2:
            task = GPT(
                width=256, layers=16, heads=4, kv_heads=4, length=128, global_batch=2 * micro_batches, megabytes=0.5,
                steps=steps,
            )  # fmt: skip
            layout = f"pp=2,micro_batch=2,schedule={schedule}"
        else:
            blocks = 8 if schedule == "interleaved" else 4
            task = Sleepers(blocks=blocks, split=schedule == "zb", global_batch=micro_batches, steps=4)
            layout = f"pp=4,micro_batch=1,schedule={schedule}"
        outcome = run_ranks(partial(waited, task, layout), ranks)
        assert outcome.result is not None, outcome.failures
        formula = (ranks - 1) / (micro_batches + ranks - 1)
        own = phalanx.Layout.parse(layout).idle(micro_batches)
        kind = "computing" if ranks == 2 else "sleeping"
        note = f"{outcome.result:.1%} idle, {own:.1%} by its formula, {formula:.1%} by 1f1b's"
        name = f"bubble, {schedule}, p={ranks}, m={micro_batches}, {kind}"
        measured[ranks, micro_batches, schedule] = outcome.result
        if schedule in ("zb", "interleaved"):
            plain = measured[ranks, micro_batches, "1f1b"]
            yield Figure(f"{name}, to 1f1b in this run", outcome.result / plain, 1.0, note)
        else:  # cores that share memory disturb each other: only the schedule itself is held to the formula
            bar = BAR if kind == "sleeping" else None
            yield Figure(f"{name}, off the formula by", abs(outcome.result / formula - 1), bar, note)
