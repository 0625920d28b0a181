"""A small language model with a fault planted in it: what `benchmarks/faults.py` trains.

``fault`` names it, ``culprit`` is the rank that has it, and ``at`` the step that shows it first. Whoever comes to the
fault writes down when: ``fault`` in the current folder.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor, nn

import phalanx
from phalanx.models.transformer import Transformer, TransformerConfig

done = 0
"""Steps of this rank."""


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def shown() -> None:
    """The fault shows now."""
    if not Path("fault").exists():
        Path("fault").write_text(str(time.time()))


def once() -> bool:
    """Whether it is asked for the first time."""
    if Path("once").exists():
        return False
    Path("once").touch()
    return True


@dataclass
class Planted(phalanx.Task):
    """Predict a token from those before it, where each is a function of the last."""

    fault: str = ""
    culprit: int = 2
    at: int = 8
    width: int = 32
    layers: int = 4
    experts: int = 0
    length: int = 16
    global_batch: int = 16
    steps: int = 24
    learning_rate: float = 2e-3

    counts = "tokens"

    def model(self) -> nn.Module:
        made = Transformer(
            TransformerConfig(
                vocabulary=64, width=self.width, layers=self.layers, heads=4, kv_heads=2, experts=self.experts
            )
        )
        plant(made, self)
        return made

    def data(self) -> Any:
        return Sentences(self)

    def callbacks(self) -> list[phalanx.Callback]:
        return [Odd(self)]

    def inputs(self, batch: dict[str, Any]) -> Any:
        return batch["tokens"]

    def loss(self, output: Any, batch: dict[str, Any]) -> phalanx.Loss:
        if self.shows("exception"):
            raise KeyError("what is missing")  # here: exception
        if self.shows("own collective"):
            dist.all_reduce(torch.ones(3))  # here: own collective
        if self.fault == "skipped" and done >= self.at and torch.is_grad_enabled() and rank() != self.culprit:
            shown()
            dist.all_reduce(torch.ones(3))  # here: skipped
        if self.shows("out of memory"):
            kept = [torch.ones(1 << 22)]  # here: out of memory
            while True:
                kept.append(torch.ones(1 << 22))
        if self.shows("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.shows("left"):
            sys.exit(0)  # here: left
        if self.shows("computes for ever"):
            while True:
                torch.ones(9).sum()
        found = phalanx.losses.cross_entropy(output, batch["targets"])
        if self.fault == "loss spike" and done == self.at and torch.is_grad_enabled():
            shown()
            found = phalanx.Loss(found.total * 50, found.count)
        return found

    def shows(self, fault: str) -> bool:
        """Whether a fault shows now, here."""
        if self.fault != fault or done < self.at or rank() != self.culprit or not torch.is_grad_enabled():
            return False
        shown()
        return True


class Sentences:
    """Tokens, each three times the last and one more."""

    def __init__(self, task: Planted) -> None:
        self.task = task

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self.task.shows("asleep"):
            time.sleep(3600)  # here: asleep
        if self.task.fault == "slow data":
            time.sleep(0.03)
        if self.task.fault == "slow data of one rank" and rank() == self.task.culprit:
            time.sleep(0.05)
        tokens = [index % 64]
        for _ in range(self.task.length):
            tokens.append((3 * tokens[-1] + 1) % 64)
        row = torch.tensor(tokens)
        return {"tokens": row[:-1], "targets": row[1:]}


class SlowFiles(LocalFileSystem):
    """A store whose writes take long: ``--checkpoints slow:///folder``."""

    protocol = "slow"

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if "w" in mode or "x" in mode:
            shown()
            time.sleep(1.0)
        return super().open(path, mode, **kwargs)


fsspec.register_implementation("slow", SlowFiles, clobber=True)


class Slow(torch.autograd.Function):
    """Its backward takes a while."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:  # type: ignore[override]
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        time.sleep(0.3)
        return gradient


def plant(model: nn.Module, task: Planted) -> None:
    """Hooks of modules."""
    own = rank() == task.culprit
    if task.fault == "slow backward" and own:
        model.blocks[1].register_forward_hook(lambda module, given, found: Slow.apply(found))
    if task.fault == "slow forward" and own:
        model.blocks[1].register_forward_hook(lambda module, given, found: time.sleep(0.3))
    if task.fault == "nan in a module":
        model.blocks[2].feed_forward.register_forward_hook(
            lambda module, given, found: found * float("nan") if own and done >= task.at else None
        )
    if task.fault == "nan once":
        model.blocks[2].feed_forward.register_forward_hook(
            lambda module, given, found: found * float("nan") if task.shows("nan once") and once() else None
        )
    if task.fault == "dead gradients":
        model.blocks[3].feed_forward.register_forward_hook(lambda module, given, found: found * 0)


class Odd(phalanx.Callback):
    """What happens between two steps."""

    def __init__(self, task: Planted) -> None:
        self.task = task

    def on_step(self, engine: Any, metrics: Any) -> None:
        global done
        task, done = self.task, metrics.step + 1
        if done < task.at:
            return
        mesh, own = engine.mesh, engine.rank == task.culprit
        if task.fault == "conditional" and own:
            shown()
            mesh.world.all_reduce(torch.ones(5)).wait()  # here: conditional
        if task.fault == "shape":
            shown()
            mesh.world.all_reduce(torch.ones(5 + own)).wait()  # here: shape
        if task.fault == "shape over tp":
            shown()
            mesh.group("tp").all_reduce(torch.ones(5 + own)).wait()  # here: shape over tp
        if task.fault == "order":
            shown()
            group, twice = mesh.group("fsdp", "cp"), [self.gather, self.reduce]
            for each in twice[::-1] if own else twice:
                each(group)
        if task.fault == "two axes":
            shown()
            axes = [("tp",), ("fsdp", "cp")]
            for axis in axes if engine.rank in (0, 3) else axes[::-1]:
                mesh.group(*axis).all_reduce(torch.ones(70000)).wait()  # here: two axes
        if task.fault == "own shape":
            shown()
            dist.all_reduce(torch.ones(5 + own))  # here: own shape
        if task.fault == "own barrier" and own:
            shown()
            dist.barrier()  # here: own barrier
        if task.fault == "drift" and own and done == task.at:
            shown()
            with torch.no_grad():
                engine.spread.weights["blocks.1.feed_forward.up_proj.weight"].shard.data[0].add_(0.01)
        if task.fault == "recompiles" and own:
            shown()
            if done == task.at:
                self.compiled = torch.compile(lambda numbers: (numbers * 2).sum(), backend="eager", dynamic=False)
            torch.compiler.reset()  # or it gives up after a few
            self.compiled(torch.ones(done))
        if task.fault == "slow callback" and own:
            time.sleep(0.3)

    @staticmethod
    def gather(group: Any) -> None:
        part = torch.ones(70)
        group.all_gather(part.new_empty(group.size, 70), part).wait()  # here: order, gather

    @staticmethod
    def reduce(group: Any) -> None:
        group.all_reduce(torch.ones(90)).wait()  # here: order, reduce


def line(fault: str) -> str:
    """File and line of where it is planted; nothing: nowhere that can be pointed at."""
    lines = Path(__file__).read_text().splitlines()
    found = [number for number, text in enumerate(lines, 1) if text.endswith(f"# here: {fault}")]
    return f"planted.py:{found[0]}" if found else ""
