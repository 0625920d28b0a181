"""Runs with a planted fault, each a few seconds on real ranks over gloo."""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path

from phalanx import cli
from phalanx.launch import heartbeats
from phalanx.launch.forkserver import Forked
from phalanx.run import Run
from phalanx.watch.diagnosis import Diagnosis
from phalanx.watch.why import why
from tests.forking import fork, printing_into

TASK = """
import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass
import torch
from torch import nn
import phalanx

calls = 0


def rank():
    return int(os.environ.get("RANK", 0))


class Samples:
    def __init__(self, task):
        self.task, self.read = task, 0

    def __len__(self):
        return 331

    def __getitem__(self, index):
        self.read += 1
        if self.task.fault == "asleep in the data" and self.read == 110 and rank() == 1:
            time.sleep(600)  # here
        if self.task.fault == "slow data":
            time.sleep(0.01)
        made = torch.Generator().manual_seed(index)
        return {"x": torch.randn(8, generator=made), "y": index % 3}


class Odd(phalanx.Callback):
    def __init__(self, fault):
        self.fault = fault

    def on_step(self, engine, metrics):
        if metrics.step < 8:
            return
        if self.fault == "a collective of one rank" and engine.rank == 1:
            engine.mesh.world.all_reduce(torch.ones(5)).wait()  # here
        if self.fault == "another shape":
            engine.mesh.world.all_reduce(torch.ones(5 + engine.rank // 2)).wait()  # here
        if self.fault == "drift" and metrics.step == 8 and engine.rank == 1:
            engine.spread.weights["2.weight"].shard.data.view(-1)[0] += 0.1
        if self.fault == "two axes":
            axes = ["dp", "fsdp"] if engine.rank in (0, 3) else ["fsdp", "dp"]
            for axis in axes:
                engine.mesh.group(*(("fsdp", "cp") if axis == "fsdp" else ("dp",))).all_reduce(torch.ones(70000)).wait()


@dataclass
class Planted(phalanx.Task):
    global_batch: int = 24
    steps: int = 14
    fault: str = ""

    def model(self):
        made = nn.Sequential(nn.Linear(8, 13), nn.ReLU(), nn.Linear(13, 3))
        if self.fault == "nothing to learn":
            made[0].register_forward_hook(lambda module, given, found: found * 0)
        if self.fault == "a module's nan" and rank() == 1:
            made[1].register_forward_hook(lambda module, given, found: found * float("nan") if calls > 6 else None)
        return made

    def data(self):
        return Samples(self)

    def callbacks(self):
        return [Odd(self.fault)]

    def inputs(self, batch):
        global calls
        calls += 1
        if self.fault == "slow rank" and rank() == 1:
            time.sleep(0.2)
        return batch["x"]

    def loss(self, output, batch):
        late = calls >= 9 and torch.is_grad_enabled()
        if self.fault == "a collective of torch's but on one rank" and late and rank() != 1:
            torch.distributed.all_reduce(output.detach().sum())  # here
        if self.fault == "a collective of torch's on one rank" and late and rank() == 1:
            torch.distributed.all_reduce(output.detach().clone())  # here
        while self.fault == "computes for ever" and late and rank() == 1:
            torch.ones(9).sum()  # here
        if self.fault == "left" and late and rank() == 1:
            sys.exit(0)  # here
        if self.fault == "exception" and late and rank() == 1:
            raise KeyError("what is missing")  # here
        if self.fault == "killed" and late and rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "a fault of memory" and late and rank() == 1:
            ctypes.string_at(0)  # here
        found = phalanx.losses.cross_entropy(output, batch["y"])
        if self.fault == "not a number" and calls == 6:
            found = phalanx.Loss(found.total * float("nan"), found.count)
        return found
"""


def line(fault: str = "") -> str:
    """File and line of where it is planted."""
    lines = TASK.splitlines()
    found = [number for number, text in enumerate(lines, 1) if text.endswith("# here")]
    chosen = [n for n in found if any(f'"{fault}"' in lines[before] for before in (n - 2, n - 3))]
    return f"planted.py:{chosen[0]}"


def _main(words: list[str], cwd: Path, least: float) -> None:
    os.chdir(cwd)
    faulthandler.disable()  # pytest's
    heartbeats.LEAST_SECONDS, heartbeats.WINDOW_SECONDS = least, 0.3
    printing_into("out")
    sys.argv = ["phalanx", *words]
    cli.main()


def started(folder: Path, fault: str, *words: str, least: float = 1.0) -> Forked:
    """A run with a fault, in a process of its own; a rank may stand still for ``least`` seconds."""
    (folder / "planted.py").write_text(TASK)
    usual = ("--run", "run", "--unchecked", "--restarts", "0", "--set", f"fault={fault}")
    return fork(_main, ["train", "planted.py", *usual, *words], folder, least)


def ended(process: Forked) -> int | None:
    process.join(timeout=90)
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
    process.close()
    return code


def diagnosed(folder: Path, fault: str, *words: str, code: int = 1) -> Diagnosis:
    """What is said of a run with a fault, when it has ended."""
    told = ended(started(folder, fault, *words))
    assert told == code, (folder / "out").read_text()
    return why(Run(folder / "run"))
