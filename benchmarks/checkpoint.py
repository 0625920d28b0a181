"""What a save costs the training beside it: the stall of a step, against torch.save and torch's own async_save.

    python benchmarks/checkpoint.py [--quick] [--only 1|2]

1 GB of weights and AdamW's moments, on one rank and on two (fsdp=2), all ways of saving in turn in one run. A step's
stall is all that it waits for: the call that begins the save, and the wait before its update. Copy and compute share
the machine's cores, so that a step may get longer by more than its stall: that is a figure of its own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import phalanx
from memory import status
from phalanx.checkpoint.manager import CheckpointManager
from phalanx.checkpoint.slot import Slot, new_memory
from phalanx.checkpoint.store import open_store
from phalanx.launch.local import run_ranks
from phalanx.recipes.gpt import GPT
from phalanx.train.checkpointing import Checkpointer
from phalanx.train.policy import Policy
from phalanx.train.restoring import Restorer
from report import Figure, report

TORCH_SAVE_BAR = 0.1
ASYNC_SAVE_BAR = 1.0
Seconds = dict[str, float]


class Waiting(phalanx.Callback):
    """Notes what is waited for before an update."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        self.wait, self.seconds = wait, 0.0

    def before_update(self, engine: Any) -> None:
        self.seconds += seconds(self.wait)


class Trial:
    """On a rank: an engine, and every way of saving what it holds."""

    def __init__(self, engine: phalanx.Engine, folder: Path, memory: list[list[int]]) -> None:
        self.engine, self.folder, self.memory = engine, folder, memory
        self.manager = CheckpointManager(open_store(folder / "ours"))
        slots = [Slot(number) for number in memory[engine.environment.rank]]
        self.checkpointer = Checkpointer(
            engine, self.manager, Policy(minutes=0, memory_steps=0, keep=1), slots=slots, note=self._noted
        )
        engine.callbacks.remove(self.checkpointer)  # what it waits for is timed here
        self.stager = DefaultStager(StagingOptions(False, False, True, False))
        self.batches, self.committed = engine.batches(), 0.0
        self.step()  # makes the moments
        self.bytes = sum(tensor.nbytes for tensor in self.state().values())

    def _noted(self, kind: str, **fields: Any) -> None:
        assert "failed" not in fields, fields
        self.committed = time.perf_counter()

    def state(self) -> dict[str, torch.Tensor]:
        """The tensors that we save, for others to save; each rank's under names of its own."""
        entries = [entry for entry in self.checkpointer.state.entries() if entry.kept]
        return {f"{self.engine.environment.rank}/{entry.name}{entry.box.offsets}": entry.value for entry in entries}

    def step(self, before_update: Callable[[], Any] = lambda: None) -> tuple[float, float]:
        """A step: its seconds, and those of them that ``before_update`` took."""

        def step() -> None:
            self.checkpointer.before_step()
            self.metrics = self.engine.step(next(self.batches))

        waiting = Waiting(before_update)
        self.engine.callbacks.add(waiting)
        took = seconds(step)
        self.engine.callbacks.remove(waiting)
        return took, waiting.seconds

    def quiet(self) -> None:
        """Begin together, with nothing left to be written."""
        os.sync()
        if dist.is_initialized():
            dist.barrier()

    def ours(self) -> Seconds:
        """A save in the background, and steps until it is committed."""
        self.quiet()
        alone, _ = self.step()
        began = time.perf_counter()
        call = seconds(lambda: self.checkpointer.stage(save=True))
        step, wait = self.step(lambda: self.checkpointer.before_update(self.engine))
        beside = [step]
        while self.metrics.signals.busy:
            beside.append(self.step()[0])
        self.checkpointer.drain()
        return {
            "stall": call + wait, "call": call, "step": alone, "longer": call + step - alone,
            "beside": statistics.mean(beside) / alone, "committed": self.committed - began,
        }  # fmt: skip

    def torch_save(self) -> Seconds:
        self.quiet()
        path = self.folder / f"plain-{self.engine.environment.rank}"
        found = seconds(lambda: torch.save(self.state(), path))
        path.unlink()
        return {"torch.save": found}

    def async_save(self, name: str, stager: DefaultStager | None) -> Seconds:
        """torch's save in the background. An asynchronous stager is waited for before the update, as ours is."""
        self.quiet()
        began, folder = time.perf_counter(), self.folder / name
        saving = dcp.async_save(self.state(), checkpoint_id=folder, async_stager=stager)
        blocked = time.perf_counter() - began
        if stager is not None:
            blocked += self.step(saving.staging_completion.result)[1]
        (saving if stager is None else saving.upload_completion).result()
        self.quiet()
        if self.engine.environment.rank == 0:
            shutil.rmtree(folder)
        return {name: blocked}

    def round(self) -> Seconds:
        return {
            **self.ours(),
            **self.torch_save(),
            **self.async_save("async_save", None),
            **self.async_save("async_save with its async stager", self.stager),
        }

    def back(self) -> Seconds:
        """The last state taken up again from memory and from files, and its files verified."""
        self.checkpointer.save_now()
        slots = [Slot(number) for numbers in self.memory for number in numbers]
        found = {}
        for name, known in (("from memory", slots), ("from files", [])):
            self.quiet()
            found[name] = seconds(Restorer(self.engine, self.manager, known).restore)
        if self.engine.environment.rank == 0:
            checkpoint = self.manager.open(self.engine.step_number)
            found["verify"] = seconds(lambda: list(checkpoint.verify()))
        self.quiet()
        return {"verify": 0.0, **found}

    def held(self) -> Seconds:
        """Memory of a rank that a save takes, as parts of its state: for slots, and at its peak beside them."""
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        self.step()
        self.checkpointer.save_now()
        return {"slots": status("RssShmem") / self.bytes, "peak": (status("VmHWM") - before) / self.bytes}


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def slowest(found: Seconds) -> Seconds:
    """By name, that of the rank which took longest."""
    values = torch.tensor(list(found.values()), dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(found, values.tolist(), strict=True))


def trial(
    task: GPT, layout: str, rounds: int, folder: Path, memory: list[list[int]]
) -> tuple[int, list[Seconds], Seconds]:
    """On a rank: bytes of its state, rounds of saves, the first one apart, and what is measured once."""
    with phalanx.Engine(task, layout, device="cpu") as engine:
        found = Trial(engine, folder, memory)
        several = [slowest(found.round()) for _ in range(rounds + 2)]  # two slots: each has its first time
        once = slowest(found.back() | found.held())
        found.checkpointer.close()
        found.stager.close()
    return found.bytes, several, once


def figures(ranks: int, layout: str, quick: bool) -> Iterator[Figure]:
    rounds = 1 if quick else 5
    task = GPT(
        width=768, layers=3 if quick else 12, heads=4, kv_heads=4, length=128, global_batch=2, megabytes=1.0,
        steps=10_000,
    )  # fmt: skip
    memory = [[new_memory(), new_memory()] for _ in range(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_ranks(partial(trial, task, layout, rounds, Path(folder), memory), ranks)
    assert outcome.result is not None, outcome.failures
    size, several, once = outcome.result
    for numbers in memory:
        for number in numbers:
            os.close(number)
    first, warm = several[0], several[2:]
    size *= ranks
    middle = {name: statistics.median(found[name] for found in warm) for name in first}
    where = f"{ranks} ranks {layout}" if ranks > 1 else "one rank"

    def ratio(name: str, other: str, bar: float | None) -> Figure:
        value = statistics.median(found[name] / found[other] for found in warm)
        note = f"{middle[name] * 1e3:.0f} ms to {middle[other] * 1e3:.0f} ms, {size / 1e9:.2f} GB, rounds: {rounds}"
        return Figure(f"{where}: {name} of a step, to {other}", value, bar, note)

    yield ratio("stall", "torch.save", TORCH_SAVE_BAR)
    yield ratio("stall", "async_save", ASYNC_SAVE_BAR)
    yield ratio("stall", "async_save with its async stager", None)
    first_ratio = first["stall"] / middle["torch.save"]
    yield Figure(
        f"{where}: stall by the first save, to torch.save", first_ratio, None, f"{first['stall'] * 1e3:.0f} ms"
    )
    note = f"of {middle['step']:.2f} s; {middle['call'] * 1e3:.1f} ms of it begin the save"
    yield Figure(f"{where}: a step with a save is longer by, s", middle["longer"], None, note)
    yield Figure(f"{where}: steps until it is committed, to one without", middle["beside"])
    yield Figure(
        f"{where}: until committed, s", middle["committed"], None, f"{size / 1e9 / middle['committed']:.2f} GB/s"
    )
    for name, what in (
        ("from memory", "restore from memory"),
        ("from files", "restore from files"),
        ("verify", "verify"),
    ):
        yield Figure(f"{where}: {what}, GB/s", size / 1e9 / once[name], None, f"{once[name]:.2f} s")
    yield Figure(f"{where}: memory of slots, parts of the state", once["slots"])
    yield Figure(f"{where}: more at the peak of a save, parts of the state", once["peak"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a rough answer in under a minute")
    parser.add_argument("--only", choices=["1", "2"], help="on so many ranks")
    options = parser.parse_args()
    places = [(1, "dp=1"), (2, "fsdp=2")]
    chosen = [(ranks, layout) for ranks, layout in places if options.only in (None, str(ranks))]
    report([figure for ranks, layout in chosen for figure in figures(ranks, layout, options.quick)])


if __name__ == "__main__":
    main()
