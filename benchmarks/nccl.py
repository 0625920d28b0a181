"""Many NCCL ranks on one GPU: every layout there against one device, in float64, tensor by tensor.

python benchmarks/nccl.py [LAYOUT ...] [--ranks 2|4|8] [--experts] [--every] [--jobs N] [--limit SECONDS] [--quick]

Without layouts: all of 2 and of 4 ranks and a covering set of 8, dense and with experts. NCCL refuses two ranks on one
GPU of one host, and takes them for ranks of several hosts where NCCL_HOSTID differs: what comes out, the order of what
is launched and whether it can get stuck are those of such hosts, its speed is not. ``--device cpu`` does the same over
gloo. A layout with ``comm`` or ``activations`` is held to what they are defined as on one device. Ranks are processes
that take one layout after another, several teams of them side by side; under NVIDIA's MPS, if it is there, since
processes that take turns on a GPU wait for each other's waiting kernels. Where a layout takes longer than the limit,
every rank's stack is printed, and a new team goes on with the next.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import itertools
import os
import pickle
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.layouts import every_layout, task_for
from tests.nccl import as_host, shared_gpu
from tests.parity import Trace, difference, reference, spread_run

import phalanx
from phalanx import Layout, Task
from phalanx.parallel.axes import overlap
from phalanx.parallel.torch_private import preload
from phalanx.prove.cases import defined
from phalanx.prove.layouts import covering
from phalanx.prove.reference.activations import round_activations, rounding
from report import Figure, report

ROOT = Path(__file__).parent.parent
BAR = 1e-12
STEPS = 2
"""The second has a short batch, and gradients that show the first update."""
CODED_STEPS = 5
"""Where gradients travel in few bits: some methods begin with an exact step, and all but it owe."""
START_SECONDS = 300
"""How long processes may take to begin."""
WARNING = re.compile(r"NCCL WARN|\[W\d|Warning:|WARNING")
"""In what ranks print: NCCL's own, those of torch's C++ and of Python."""


@dataclass(frozen=True)
class Case:
    """A layout to try."""

    world: int
    layout: Layout

    @property
    def task(self) -> Task:
        return replace(task_for(self.layout), steps=CODED_STEPS if self.layout.coded_axis else STEPS)

    @property
    def micro_batches(self) -> int:
        return self.layout.micro_batches(self.task.global_batch)

    @property
    def kind(self) -> str:
        coded = ", in few bits" if rounding(self.layout) else ""
        return f"{self.world} ranks, {'with experts' if self.layout.ep > 1 else 'dense'}{coded}"

    @property
    def known_by(self) -> tuple[str, int, str]:
        """Cases with the same are the same on one device, which rounds as the layout's ranks would."""
        return repr(self.task), self.micro_batches, str(self.layout) if rounding(self.layout) else ""

    def one_device(self, device: str) -> Trace:
        """By hand."""
        coded = defined(self.task, self.layout) if self.layout.coded_axis else None
        observe = partial(round_activations, self.task, self.layout)
        return reference(self.task, self.micro_batches, device, coded=coded, observe=observe)


@dataclass
class Result:
    """What became of it."""

    case: Case
    seconds: float
    ready: float = 0.0
    """Of these, until the engine was made."""
    error: float = float("inf")
    words: str = ""
    """Where the error is largest, or what else happened."""
    hung: bool = False
    failed: bool = False


# A rank


def serve(rank: int, descriptor: int, device: str, limit: float) -> None:
    """A rank's whole life: one layout after another, each in a process group of its own."""
    pipe = Connection(descriptor)
    preload()  # modules are imported, and CUDA is up, before the first layout's time begins
    assert phalanx.Engine
    overlap.LEAST_BYTES = overlap.CHUNK_BYTES = 1  # however little is summed, tp computes meanwhile
    torch.zeros(1, device=device)
    pipe.send_bytes(b"ready")
    while True:
        try:
            case: Case = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        faulthandler.dump_traceback_later(limit)
        try:
            if os.environ["WORLD_SIZE"] == "1":
                trace = case.one_device(device)
            else:
                trace = spread_run(case.task, case.layout, device)
            pipe.send_bytes(pickle.dumps(trace if rank == 0 else Trace(trace.losses, trace.norms)))
        except Exception:
            pipe.send_bytes(pickle.dumps(traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
        gc.collect()
        sys.stderr.flush()


# The process that starts them


class Team:
    """So many rank processes, which find each other in a store of their own."""

    def __init__(self, world: int, device: str, limit: float, folder: Path) -> None:
        self.world, self.limit, self.begun = world, limit, False
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.pipes: list[Connection] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.logs = [folder / f"{next(NUMBERS)}.log" for _ in range(world)]
        for rank in range(world):
            ours, theirs = Pipe()
            command = [sys.executable, __file__, "--serve", str(rank), str(theirs.fileno()), device, str(limit)]
            with self.logs[rank].open("wb") as log:
                self.processes.append(subprocess.Popen(
                    command, env=self._environment(rank, device), stdout=log, stderr=log, pass_fds=[theirs.fileno()]
                ))  # fmt: skip
            theirs.close()
            self.pipes.append(ours)

    def _environment(self, rank: int, device: str) -> dict[str, str]:
        alike = {
            "WORLD_SIZE": str(self.world), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        own = {"RANK": str(rank)}
        if device == "cpu":
            return {**os.environ, **alike, **own, "GLOO_SOCKET_IFNAME": "lo"}
        return {**as_host(rank), "NCCL_DEBUG": "WARN", **os.environ, **alike, **own}

    def begin(self) -> None:
        """Wait for all to be there."""
        self.begun = True
        for rank, pipe in enumerate(self.pipes):
            try:
                begun = pipe.poll(START_SECONDS) and pipe.recv_bytes()
            except EOFError:
                begun = False
            if not begun:
                raise RuntimeError(f"rank {rank} did not begin:\n{self.said(rank)}")

    def ask(self, case: Case) -> list[Trace | str | None]:
        """By rank: what it did, how it failed, or None where it was not done in time."""
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps(case))
        answers: list[Trace | str | None] = [None] * self.world
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        deadline = time.monotonic() + self.limit + 2  # for the stacks
        while waiting and (ready := wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    answers[rank] = f"rank {rank} died:\n{self.said(rank)[-2000:]}"
                if isinstance(answers[rank], str):
                    deadline = min(deadline, time.monotonic() + 3)  # others may wait for it
        return answers

    def said(self, rank: int) -> str:
        return self.logs[rank].read_text(errors="replace")

    def close(self, kill: bool = False) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            if kill:
                process.kill()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Bench:
    """All cases, by several teams at once."""

    def __init__(self, device: str, limit: float, folder: Path) -> None:
        self.device, self.limit, self.folder = device, limit, folder
        self.results: list[Result] = []
        self.warnings: Counter[str] = Counter()
        self._known: dict[tuple[str, int, str], Trace] = {}
        self._one = Team(1, device, limit, folder)
        self._lock, self._knowing, self._printing = threading.Lock(), threading.Lock(), threading.Lock()

    def run(self, cases: Sequence[Case], teams: int) -> None:
        """Cases of one number of ranks."""
        queue = iter(cases)
        teams = min(teams, len(cases))
        with ThreadPoolExecutor(teams) as threads:
            for done in [threads.submit(self._drive, queue, cases[0].world) for _ in range(teams)]:
                done.result()

    def _drive(self, queue: Iterator[Case], world: int) -> None:
        team = Team(world, self.device, self.limit, self.folder)
        try:
            team.begin()
            while (case := self._next(queue)) is not None:
                started = time.monotonic()
                answers = team.ask(case)
                result = self._result(case, answers, time.monotonic() - started)
                self.results.append(result)
                self._tell(result, team)
                if result.hung or result.failed:  # what its ranks say of each other's end is no news
                    team.close(kill=True)
                    team = Team(world, self.device, self.limit, self.folder)
                    team.begin()
            team.close()
            self._gather_warnings(team)
        finally:
            team.close(kill=True)

    def _next(self, queue: Iterator[Case]) -> Case | None:
        with self._lock:
            return next(queue, None)

    def _result(self, case: Case, answers: list[Trace | str | None], seconds: float) -> Result:
        failures = [answer for answer in answers if isinstance(answer, str)]
        if failures:
            return Result(case, seconds, words=failures[0], failed=True)
        traces = [answer for answer in answers if isinstance(answer, Trace)]
        if len(traces) < len(answers):
            missing = ", ".join(str(rank) for rank, answer in enumerate(answers) if answer is None)
            return Result(case, seconds, words=f"hangs: nothing from rank {missing}", hung=True)
        try:
            error, where = difference(traces[0], self._one_device(case))
            assert all((t.losses, t.norms) == (traces[0].losses, traces[0].norms) for t in traces), "ranks disagree"
        except AssertionError as unequal:
            return Result(case, seconds, traces[0].ready, words=f"differs: {unequal}")
        return Result(case, seconds, traces[0].ready, error, where)

    def _one_device(self, case: Case) -> Trace:
        """The same on one device, in a process of its own: this one touches no GPU."""
        key = case.known_by
        with self._knowing:
            if not self._one.begun:
                self._one.begin()
            if key not in self._known:
                (trace,) = self._one.ask(case)
                assert isinstance(trace, Trace), f"one device: {trace}"
                self._known[key] = trace
            return self._known[key]

    def close(self) -> None:
        self._one.close()

    def _tell(self, result: Result, team: Team) -> None:
        with self._printing:
            said = f"{result.error:9.2e}" if result.error < float("inf") else "     FAIL"
            words = result.words.strip().splitlines()[-1] if result.failed else result.words
            took = f"{result.ready:4.1f} + {result.seconds - result.ready:4.1f} s"
            print(f"{said}  {took}  {result.case.kind:<22} {result.case.layout}  {words}", flush=True)
            if result.failed:
                print(result.words, flush=True)
            if result.hung:
                for rank in range(team.world):
                    stack = team.said(rank).rpartition("Timeout (")[2]
                    print(f"--- rank {rank}\n{stack[-6000:]}", flush=True)

    def _gather_warnings(self, team: Team) -> None:
        for rank in range(team.world):
            for line in team.said(rank).splitlines():
                if WARNING.search(line):
                    with self._lock:
                        self.warnings[_without_numbers(line)] += 1

    def figures(self) -> list[Figure]:
        found = []
        for kind in dict.fromkeys(result.case.kind for result in self.results):
            own = [result for result in self.results if result.case.kind == kind]
            worst = max(own, key=lambda result: result.error)
            note = f"{len(own)} layouts; {worst.case.layout}: {worst.words.strip().splitlines()[-1]}"
            found.append(Figure(f"{kind}: worst tensor, relative", worst.error, BAR, note[:200]))
            found.append(Figure(f"{kind}: hangs", sum(result.hung for result in own), 0))
            found.append(Figure(f"{kind}: errors", sum(result.failed for result in own), 0))
        for line, count in self.warnings.most_common():
            print(f"warning, {count} times: {line}")
        return [*found, Figure("warnings", len(self.warnings), 0, "of NCCL, torch or Python, each counted once")]


NUMBERS = itertools.count()


def _without_numbers(line: str) -> str:
    """A warning without its time, rank and process, so that the same of several ranks is one."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", line)[:300]


def chosen(options: argparse.Namespace) -> list[Case]:
    """What to try: the layouts named, or by number of ranks."""
    if options.layouts:
        layouts = [Layout.parse(text) for text in options.layouts]
        return [Case(layout.world, layout) for layout in layouts]
    cases = []
    for world in [options.ranks] if options.ranks else [2, 4, 8]:
        for experts in [True] if options.experts else [False, True]:
            layouts = sorted(every_layout(world, experts=experts), key=lambda layout: layout.pp == 1)  # hardest first
            if options.quick or (world > 4 and not options.every):
                layouts = covering(layouts)
            cases += [Case(world, layout) for layout in layouts]
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "layouts", nargs="*", metavar="LAYOUT", help="e.g. fsdp=2,tp=2; ep=2 takes a model with experts"
    )
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8), help="only layouts of so many ranks")
    parser.add_argument("--experts", action="store_true", help="only layouts that spread experts")
    parser.add_argument("--every", action="store_true", help="all layouts of 8 ranks, not a covering set")
    parser.add_argument("--jobs", type=int, help="teams of ranks side by side; by itself as many as cores allow")
    parser.add_argument("--limit", type=float, default=60, help="seconds a layout may take before it hangs")
    parser.add_argument("--quick", action="store_true", help="covering sets of every number of ranks")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = chosen(options)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ExitStack() as undo:
        shared = options.device == "cuda" and undo.enter_context(shared_gpu(Path(folder)))
        bench = Bench(options.device, options.limit, Path(folder))
        undo.callback(bench.close)
        started = time.monotonic()
        for world in sorted({case.world for case in cases}):
            teams = options.jobs or max(1, (2 if shared else 1) * (os.cpu_count() or 1) // world)
            bench.run([case for case in cases if case.world == world], teams)
        print(f"{len(cases)} layouts in {time.monotonic() - started:.0f} s{', under MPS' if shared else ''}")
    report(bench.figures())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], float(sys.argv[5]))
    else:
        main()
