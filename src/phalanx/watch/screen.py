"""The screen: a table at the start, one live line while it runs, and the shape of the loss at the end."""

from __future__ import annotations

import resource
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

import torch

from phalanx import inventory
from phalanx.cluster import devices
from phalanx.train.engine import Engine
from phalanx.train.step import Metrics
from phalanx.words import many, round_number

REFRESH_SECONDS = 0.1
QUIET_SECONDS = 60.0
LINES = 20
"""About so many lines a run has where they do not renew themselves, besides one a minute."""
RECENT = 50
"""So many steps tell how fast it goes."""


class Screen:
    """Rank 0's output. On a terminal a line that renews itself; elsewhere one every so many steps, and every minute."""

    def __init__(self, engine: Engine, out: IO[str] | None = None) -> None:
        self.engine, self.out = engine, out or sys.stdout
        self.live = self.out.isatty()
        self.open = True
        self.shown = time.monotonic()
        self._recent = self.shown
        self.seconds: deque[float] = deque(maxlen=RECENT)
        self.amounts: deque[float] = deque(maxlen=RECENT)
        """Of the last steps: how long each took, and how many samples or tokens it had."""
        self.gathered = 0
        self.twice = False
        self.losses: dict[str, str] = {}
        """Of the last step, or of the last of each turn."""

    def start(self) -> None:
        engine = self.engine
        shapes, trainable = engine.spread.holding.shapes, engine.spread.trainable
        weights = sum(shapes[name].numel() for name in trainable)
        learned = sum(shapes[name].numel() for name, trained in trainable.items() if trained)
        world = engine.environment.world
        micro = many(engine.loader.micro_batches, "micro-batch", "micro-batches")
        frozen = f", {learned:,} of them trainable" if learned < weights else ""
        facts = {
            "layout": f"{engine.layout} on {many(world, 'rank')}, {devices(engine.device.type, world)}",
            "model": f"{many(weights, 'weight')}{frozen}, {engine.anatomy.describe()}",
            **self._here(),
            "memory": str(self._memory()),
            "batch": f"{many(engine.task.global_batch, 'sample')} as {micro} a step, "
            f"{many(engine.order.size, 'sample')} an epoch",
            "dtypes": engine.dtypes.table(),
        }
        for name, text in facts.items():
            self._write(f"{name:>7}  {text}")
        device = engine.device.type
        for note in [*engine.layout.notes(device, engine.loader.micro_batches), *engine.dtypes.notes(device)]:
            self._write(f"   note  {note}")
        self._note_gathered()

    def _note_gathered(self) -> None:
        """Where ranks of ``tp`` do all of the same work, and why: some is found out in the first step."""
        reasons = [c.gathered for c in self.engine.spread.plan.containers.values() if c.gathered]
        if len(reasons) > self.gathered:
            self.gathered = len(reasons)
            more = f", and {len(reasons) - 1} more like it" if len(reasons) > 1 else ""
            self.said(f"   note  ranks of tp compute all of it alike where {reasons[-1]}{more}")

    def _note_twice(self) -> None:
        """That a loss needs all micro-batches, and what that costs: it is found out in the first step."""
        if self.engine.spread.samples.all_at_once and not self.twice:
            self.twice = True
            self.said("   note  the loss needs all micro-batches of a step at once: each goes through the model twice")

    def _here(self) -> dict[str, str]:
        """What this rank has of the model, where ranks have parts."""
        spread, layout = self.engine.spread, self.engine.layout
        if layout.fsdp * layout.tp * layout.cp * layout.pp == 1:
            return {}
        own = sum(weight.piece.numel() for weight in spread.weights.values() if weight.trainable)
        text = f"{own:,} of them updated by rank 0"
        if spread.pipeline is not None:
            stages = " | ".join(f"{blocks[0]} to {blocks[-1]}" for blocks in spread.pipeline.stages.blocks)
            text += f"; stages: {stages}"
        return {"here": text}

    def _memory(self) -> inventory.Memory:
        """By arithmetic, of rank 0, which has its part of the model."""
        engine = self.engine
        weights = engine.spread.weights.values()
        held, trained = (
            sum(weight.rows * weight.row_size for weight in weights if weight.trainable or not learned)
            for learned in (False, True)
        )
        numbers = inventory.state_numbers(engine.optimizer)
        return inventory.memory(held, trained, engine.layout, engine.dtypes, numbers)

    def resumed(self, source: str, step: int) -> None:
        self.said(f" resume  after step {step} from {source}")

    def said(self, line: str) -> None:
        self._write(("\r" if self.live else "") + line)

    def step(self, metrics: Metrics) -> None:
        self._note_gathered()
        self._note_twice()
        self.losses[metrics.turn] = _loss(metrics)
        now = time.monotonic()
        amount = metrics.count if self.engine.task.counts == "tokens" else metrics.slots
        self.seconds.append(now - self._recent)
        self.amounts.append(amount)
        self._recent = now
        done, steps = metrics.step + 1, self.engine.task.steps
        last = done == steps
        due = now - self.shown >= (REFRESH_SECONDS if self.live else QUIET_SECONDS)
        if not (due or (last if self.live else last or done % round_number(steps / LINES) == 0)):
            return
        self.shown = now
        line = self._line(metrics)
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            self._write("\r" + line[:width].ljust(width), end="\n" if last else "")
        else:
            self._write(line)

    def _line(self, metrics: Metrics) -> str:
        task = self.engine.task
        done = metrics.step + 1
        seconds = max(sum(self.seconds), 1e-9)  # both of the same steps
        rate, left = sum(self.amounts) / seconds, seconds / len(self.seconds) * (task.steps - done)
        bar = "━" * round(10 * done / task.steps)
        losses = "  ".join(self.losses.values())
        return (
            f"{bar:─<10} step {done}/{task.steps}  {losses}  {rate:,.0f} {task.counts}/s  "
            f"{memory_bytes(self.engine.device) / 2**30:.2f} GiB  {_clock(left)} left"
        )

    def evaluation(self, step: int, measures: dict[str, float]) -> None:
        text = "  ".join(f"{name} {value:.4f}" for name, value in measures.items())
        self._write(("\r" if self.live else "") + f"held out after step {step + 1}: {text}")

    def _write(self, text: str, end: str = "\n") -> None:
        """A reader that goes away does not end the training."""
        if self.open:
            try:
                print(text, file=self.out, end=end, flush=True)
            except (BrokenPipeError, ValueError):
                self.open = False


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """For work on files: a line that renews itself on a terminal; elsewhere nothing."""
    live, shown = sys.stderr.isatty(), 0.0

    def show(what: str, done: int, total: int) -> None:
        nonlocal shown
        if live and (time.monotonic() - shown > REFRESH_SECONDS or done == total):
            shown = time.monotonic()
            print(f"\r{what}: {done / 2**20:,.0f} of {total / 2**20:,.0f} MiB", end="", file=sys.stderr, flush=True)

    yield show
    if shown:
        print("\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)


def memory_bytes(device: torch.device) -> int:
    """The most memory this rank has held: on the GPU by tensors, on the host by the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _loss(metrics: Metrics) -> str:
    """Under the name of its turn, where steps take turns."""
    if metrics.skipped:
        return f"{metrics.turn} skipped: not finite".lstrip()
    named = ", ".join(f"{name} {value:.4f}" for name, value in metrics.losses.items())
    return f"{metrics.turn or 'loss'} {metrics.loss:.4f}" + (f" ({named})" if named else "")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
