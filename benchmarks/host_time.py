"""Host time: what a step of a 70B model's structure costs in Python of ours, on one rank of 64.

    python benchmarks/host_time.py [--quick] [--layouts fsdp=64 ...] [--files N] [--device cuda]

80 blocks of 9 weights each, of width 64, so that kernels take next to nothing; bf16; the other ranks are there in name
alone (`simulated.py`), collectives are noted in a flight record as in a run, and Adam's update is prepared as on a GPU
and launches nothing. Processor time of one thread. ``--device cuda``: on a GPU, all kernels launched, and with
``graphs=step`` too, whose steps are replayed. Three views of the same step:

- the whole step, against a plain loop over the same model (forward, backward, clip, AdamW), in turns, medians;
- Python of ours: own time by file as cProfile sees it, less what its own calls cost, which is measured first. Time in
  torch's operators, in its Python and in what stands for other ranks is not ours, nor is the model's forward;
- what does not depend on a machine: calls of our functions, our calls of functions in C, bytecodes of ours, and torch
  operators beyond the plain loop's.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import phalanx
import simulated
from by_hand import interleaved
from phalanx import flight
from phalanx.data import Arrays
from phalanx.kernels import adamw
from phalanx.layout import Layout
from phalanx.models.transformer import Transformer, TransformerConfig
from phalanx.parallel.communication.recorder import FlightRecorder
from phalanx.parallel.communication.traffic import Traffic
from report import Figure, report

OURS = str(Path(phalanx.__file__).parent)
NOT_OURS = (f"{OURS}/models/",)
LAYOUTS = "fsdp=64", "fsdp=64,zero=2", "fsdp=64,zero=1", "dp=1"
ON_A_GPU = "fsdp=64,graphs=step", "fsdp=64"
WARM = 6
"""Steps before those that are measured, in which a graph is recorded."""
BAR = 5.0
BARRED = LAYOUTS[0], ON_A_GPU[0]
SHAPE = TransformerConfig(vocabulary=256, width=64, layers=80, heads=4, kv_heads=4, hidden=256)


@dataclass
class Model(phalanx.Task):
    """A language model of 80 small blocks on empty text."""

    precision: Any = "bf16"

    def model(self) -> Transformer:
        return Transformer(SHAPE)

    def data(self) -> Arrays:
        return Arrays(tokens=torch.zeros(1 << 12, 17, dtype=torch.int64))

    def inputs(self, batch: dict[str, Any]) -> torch.Tensor:
        return batch["tokens"][:, :-1]

    def loss(self, output: Any, batch: dict[str, Any]) -> phalanx.Loss:
        return phalanx.losses.cross_entropy(output, batch["tokens"][:, 1:])


class Plain:
    """The same model in a loop by hand, on one device."""

    def __init__(self, task: Model, device: str) -> None:
        self.task, self.model = task, task.model().bfloat16().to(device)
        self.weights = list(self.model.parameters())
        self.optimizer = task.optimizer(self.weights)
        self.batch = {"tokens": torch.zeros(1, 17, dtype=torch.int64, device=device)}

    def step(self) -> None:
        loss = self.task.loss(self.model(self.task.inputs(self.batch)), self.batch)
        (loss.total / loss.count).backward()
        nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Adam's update is the kernel's, which here launches nothing."""
    launcher: Any = types.ModuleType("phalanx.kernels.adamw_triton")
    launcher.SPAN, launcher.update = 4096, lambda *_: None
    before = sys.modules.get(launcher.__name__)
    sys.modules[launcher.__name__] = launcher
    used, adamw.KERNEL.used = adamw.KERNEL.used, lambda tensor: True  # type: ignore[method-assign]
    try:
        yield
    finally:
        adamw.KERNEL.used = used  # type: ignore[method-assign]
        if before is None:
            del sys.modules[launcher.__name__]
        else:
            sys.modules[launcher.__name__] = before


@contextmanager
def stepping(text: str, device: str) -> Iterator[Callable[[], Any]]:
    """A step of ours, on a rank in the middle."""
    layout, rank = Layout.parse(text), Layout.parse(text).world // 2 + 1
    each = 8 if device == "cpu" else 1
    world = simulated.rank_of(layout.world, rank, each) if layout.world > 1 else nullcontext()
    with world, as_on_a_gpu() if device == "cpu" else nullcontext():
        task = Model(global_batch=layout.batch_ranks, steps=4000)
        recorder = FlightRecorder(memoryview(bytearray(flight.BYTES)), layout.world // 2, layout.world, 1)
        traffic = Traffic(memoryview(bytearray(24)).cast("q"), recorder)
        engine = phalanx.Engine(task, layout, device=device, traffic=traffic)
        yield as_a_rank(engine)
        engine.close()


def as_a_rank(engine: phalanx.Engine) -> Callable[[], Any]:
    """A step, called as in a run, where nothing of the user's stands above it: collectives look for that."""
    names: dict[str, Any] = {"engine": engine, "batches": engine.batches()}
    exec(compile("def _rank():\n    return engine.step(next(batches))", f"{OURS}/launch/local.py", "exec"), names)
    return names["_rank"]


@dataclass
class Python:
    """What a step did in Python of ours, by file."""

    milliseconds: Counter[str]
    calls: Counter[str]
    into_c: Counter[str]
    wire: float
    """Milliseconds in what stands for other ranks."""


def profiled(step: Callable[[], Any], steps: int) -> Python:
    """The quickest of some steps: the profiler's clock goes on while others have the processor."""
    found, by_itself = [], costs()
    for _ in range(steps):
        profile = cProfile.Profile()
        profile.runcall(step)
        found.append(_read(profile, *by_itself))
    return min(found, key=lambda python: python.milliseconds.total())


def _read(profile: cProfile.Profile, a_call: float, a_call_into_c: float) -> Python:
    seconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    into_c: Counter[str] = Counter()
    wire = 0.0
    table: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    for (file, _, name), (_, times, own, whole, callers) in table.items():
        if file == simulated.__file__ and name in vars(simulated.Echo):
            wire += whole
        if is_ours(file):
            seconds[file] += own - a_call * times
            calls[file] += times
        elif file == "~":
            for (caller, _, _), (_, of_caller, _, _) in callers.items():
                if is_ours(caller):
                    into_c[caller] += of_caller
                    seconds[caller] -= a_call_into_c * of_caller
    milliseconds, calls, into_c = (
        Counter({file.removeprefix(f"{OURS}/"): max(0.0, count) for file, count in found.items()})
        for found in (Counter({file: 1e3 * spent for file, spent in seconds.items()}), calls, into_c)
    )
    return Python(milliseconds, calls, into_c, 1e3 * wire)


def is_ours(file: str) -> bool:
    return file.startswith(OURS) and not file.startswith(NOT_OURS)


def costs(times: int = 100_000) -> tuple[float, float]:
    """Seconds that the profiler adds to the own time of Python for a call, and for a call into C."""

    def nothing() -> None:
        pass

    def loop(work: Callable[..., Any], *given: Any) -> None:
        for _ in range(times):
            work(*given)

    found = []
    for work, given in ((nothing, ()), (abs, (1,))):
        tries = []
        for _ in range(5):
            started = time.perf_counter()
            loop(work, *given)
            plain = time.perf_counter() - started
            profile = cProfile.Profile()
            profile.runcall(loop, work, *given)
            rows: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
            own = sum(row[2] for (file, _, _), row in rows.items() if file != "~")
            tries.append((own - plain) / times)
        found.append(max(0.0, statistics.median(tries)))
    return found[0], found[1]


def bytecodes(step: Callable[[], Any]) -> int:
    """Instructions of our own code in a step."""
    count = 0

    def local(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "opcode"
        return local

    def entered(frame: Any, event: str, argument: Any) -> Any:
        if not is_ours(frame.f_code.co_filename):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return local

    sys.settrace(entered)
    try:
        step()
    finally:
        sys.settrace(None)
    return count


class Operators(TorchDispatchMode):
    """Counts torch's operators."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operators(step: Callable[[], Any]) -> int:
    with Operators() as mode:
        step()
    return mode.count


def measured(text: str, pairs: int, files: int, device: str) -> Iterator[Figure]:
    plain = Plain(Model(), device)
    with stepping(text, device) as step:
        for _ in range(WARM):
            step()
            plain.step()
        gc.collect()
        found = interleaved(lambda _: step(), lambda _: plain.step(), pairs, time.process_time)
        ours, theirs = (1e3 * statistics.median(side) for side in zip(*found, strict=True))
        python = profiled(step, max(5, pairs // 2))
        instructions, issued = bytecodes(step), operators(step) - operators(plain.step)
    note = f"whole step {ours:.1f} ms, plain loop {theirs:.1f} ms, standing for other ranks {python.wire:.1f} ms"
    yield Figure(f"{text}: Python of ours, ms", python.milliseconds.total(), BAR if text in BARRED else None, note)
    yield Figure(f"{text}: beyond the plain loop, ms", ours - theirs - python.wire)
    yield Figure(f"{text}: calls of our functions", python.calls.total(), note=f"{python.into_c.total():.0f} into C")
    yield Figure(f"{text}: bytecodes of ours", instructions)
    yield Figure(f"{text}: torch operators beyond the plain loop's", issued)
    for file, milliseconds in python.milliseconds.most_common(files):
        into_c = f"{python.into_c[file]:.0f} into C"
        yield Figure(f"{text}:   {file}, ms", milliseconds, note=f"{python.calls[file]:.0f} calls, {into_c}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a rough answer in under a minute")
    parser.add_argument("--layouts", nargs="+", default=None)
    parser.add_argument("--files", type=int, default=8, help="so many files of ours, the dearest first")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    usual = LAYOUTS if options.device == "cpu" else ON_A_GPU
    layouts, pairs = options.layouts or (usual[:1] if options.quick else usual), 8 if options.quick else 24
    report([f for text in layouts for f in measured(text, pairs, options.files, options.device)])


if __name__ == "__main__":
    main()
