"""Planted faults: does `phalanx why` name the right cause, rank and place of each, and nothing in runs that are well?

python benchmarks/faults.py [--quick] [--only WORD] [--keep FOLDER]

Each fault is a run of its own, on 2 to 8 ranks of this machine over gloo, of the task in `planted.py`. ``seconds`` are
those from the moment that the fault shows to the verdict, less what the run is allowed to wait: how long a rank may
stand still, or ``--timeout``. Of runs that end by themselves they are those that `why` takes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share cores, and a process with threads cannot enter a namespace

from tests.forking import printing_into
from tests.hosts import Hosts, missing, on_host

import planted
from phalanx import cli
from phalanx.launch.forkserver import Forked, ForkServer
from phalanx.launch.heartbeats import LEAST_SECONDS
from phalanx.run import Run
from phalanx.words import columns
from report import Figure, report

MEMORY = Path("/sys/fs/cgroup/memory")
"""Where version 1 of cgroups limits memory."""
SLOW_LINK = "30mbit"
STAGES = "pp=2,dp=2,micro_batch=2"
WIDE = ("--set", "width=128")
LONGEST = 300.0


@dataclass(frozen=True)
class Fault:
    """One fault, and what should be said of it."""

    name: str
    fault: str
    layout: str
    kind: str
    rank: int | None = 2
    """Whose fault it is; None: nobody's alone."""
    place: bool = False
    """Whether its line is to be named."""
    says: tuple[str, ...] = ()
    """Patterns that the verdict's words must have."""
    words: tuple[str, ...] = ()
    allowed: float = 0.0
    """Seconds that nobody would call it a fault for."""
    started: Callable[[Fault, Path, ForkServer], Any] | None = None
    struck: Callable[[Forked, Fault], object] | None = None
    """Done to it when the step before the fault is over."""
    steps: int = 24
    axis: str = ""


def ranks_of(pid: int) -> list[int]:
    """A supervisor's ranks."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout.split()
    return sorted(map(int, found))


def stop(process: Forked, fault: Fault) -> None:
    os.kill(ranks_of(process.pid)[fault.rank or 0], signal.SIGSTOP)


def throttled(process: Forked, fault: Fault) -> None:
    """One rank shares a core with others that leave it little."""
    rank, core = ranks_of(process.pid)[fault.rank or 0], max(os.sched_getaffinity(0))
    for thread in Path(f"/proc/{rank}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})
        os.setpriority(os.PRIO_PROCESS, int(thread.name), 15)
    busy = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile os.path.exists('/proc/{process.pid}'): pass"
    subprocess.Popen([sys.executable, "-c", busy])


def confined(fault: Fault, folder: Path, server: ForkServer) -> Forked:
    """In a cgroup that has little memory."""
    group = MEMORY / f"{Path(*own_group().parts[1:])}/faults-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(3 << 30))
    return server.fork(command, [*train(fault, folder)], str(folder), str(group))


def own_group() -> Path:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    return Path(next(line.split(":")[2] for line in lines if ":memory:" in line))


def train(fault: Fault, folder: Path) -> list[str]:
    words = [word.replace("{folder}", str(folder)) for word in fault.words]
    return [
        "train", str(Path(planted.__file__)), "--layout", fault.layout, "--run", "run", "--unchecked",
        "--restarts", "0", "--steps", str(fault.steps), "--set", f"fault={fault.fault}", *words,
        *(("--set", f"culprit={fault.rank}") if fault.rank is not None else ()),
    ]  # fmt: skip


def command(words: list[str], folder: str, group: str = "") -> None:
    """A command line of ours, in a process that a warm one was forked into."""
    if group:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    os.chdir(folder)
    printing_into("out")
    sys.argv = ["phalanx", *words]
    cli.main()


class OnHosts:
    """A run on two hosts, with a slow link between them."""

    def __init__(self, fault: Fault, folder: Path, server: ForkServer) -> None:
        self._hosts = Hosts(2, folder)
        self._hosts.__enter__()
        for name in self._hosts.names:
            self._hosts.switch.tc(f"qdisc add dev {name} root tbf rate {SLOW_LINK} burst 16kb latency 400ms")
        words = [*train(fault, folder), "--meet", "10.77.0.1:29400", "--min-nodes", "2", "--max-nodes", "2"]
        self._each = [
            server.fork(on_host, self._hosts[name].process.pid, command, ([*words, "--host", name], str(folder)))
            for name in self._hosts.names
        ]

    @property
    def exitcode(self) -> int | None:
        return next((each.exitcode for each in self._each if each.exitcode is None), 0)

    def join(self, timeout: float | None = None) -> None:
        for process in self._each:
            process.join(timeout)
        if self.exitcode is not None:
            self._hosts.__exit__(None, None, None)

    def kill(self) -> None:
        for process in self._each:
            process.kill()


@dataclass
class Result:
    """What was said of a run, whether it was right, and how long that took."""

    name: str
    told: dict[str, Any]
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


def tried(fault: Fault, folder: Path, server: ForkServer) -> Result:
    """Run it, ask, and judge."""
    folder.mkdir(parents=True)
    process = (fault.started or started)(fault, folder, server)
    if fault.struck is not None:
        run, deadline = Run(folder / "run"), time.monotonic() + LONGEST
        while time.monotonic() < deadline and not (run.path.exists() and len(run.ledger()) > 8):
            time.sleep(0.05)
        fault.struck(process, fault)
        (folder / "fault").write_text(str(time.time()))
    process.join(LONGEST)
    if process.exitcode is None:
        process.kill()
        process.join()
    asked = time.time()
    told = why(folder, server)
    shown = folder / "fault"
    since = float(shown.read_text()) if fault.kind not in ("slow", "wrong", "nothing") and shown.exists() else asked
    return Result(fault.name, told, list(judged(fault, told)), time.time() - since - fault.allowed)


def started(fault: Fault, folder: Path, server: ForkServer) -> Forked:
    return server.fork(command, train(fault, folder), str(folder))


def why(folder: Path, server: ForkServer) -> dict[str, Any]:
    """What the command says."""
    (folder / "out").rename(folder / "trained") if (folder / "out").exists() else None
    process = server.fork(command, ["why", "run", "--json"], str(folder))
    process.join(LONGEST)
    text = (folder / "out").read_text()
    with suppress(ValueError):
        found: dict[str, Any] = json.loads(text)
        return found
    return {"kind": "no answer", "summary": text[-300:], "evidence": [], "rank": None, "place": None, "axis": None}


def judged(fault: Fault, told: dict[str, Any]) -> Iterator[str]:
    """What is not as it should be."""
    words = "\n".join([told["summary"], *told["evidence"]])
    if told["kind"] != fault.kind:
        yield f"kind {told['kind']}, not {fault.kind}"
    if fault.rank is not None and told["rank"] != fault.rank:
        yield f"rank {told['rank']}, not {fault.rank}"
    if fault.place and not (told["place"] or "").endswith(planted.line(fault.fault)):
        yield f"place {told['place']}, not {planted.line(fault.fault)}"
    if fault.axis and told["axis"] != fault.axis:
        yield f"axis {told['axis']}, not {fault.axis}"
    for pattern in fault.says:
        if not re.search(pattern, words):
            yield f"no {pattern!r}"


HANG = LEAST_SECONDS
GOES_OUT = {"words": ("--timeout", "6"), "allowed": 6.0}
"""What a rank that reads or computes is given."""
LINE = (r"planted.py:\d+",)
FAULTS = [
    Fault("rank-conditional collective", "conditional", "dp=4", "desynchronised", place=True, allowed=HANG),
    Fault("and through torch", "own collective", "dp=4", "stuck", place=True, allowed=HANG),
    Fault("skipped through torch", "skipped", "dp=4", "stuck", place=True, allowed=HANG),
    Fault("a barrier of one rank", "own barrier", "fsdp=2,tp=2", "stuck", place=True, allowed=HANG),
    Fault("mismatched order", "order", "fsdp=4", "desynchronised", says=LINE, axis="fsdp", allowed=HANG),
    Fault("mismatched order, sub-axis", "order", "fsdp=2,tp=2", "desynchronised", says=LINE, axis="fsdp", allowed=HANG),
    Fault("mismatched shape", "shape", "dp=4", "desynchronised", place=True),
    Fault("mismatched shape, sub-axis", "shape over tp", "fsdp=2,tp=2", "desynchronised", place=True, axis="tp"),
    Fault("mismatched shape through torch", "own shape", "dp=4", "desynchronised", place=True),
    Fault("deadlock of two axes", "two axes", "fsdp=2,tp=2", "deadlock", None, place=True, allowed=HANG),
    Fault("asleep in the data", "asleep", "dp=4", "stuck", place=True, says=("in data",), **GOES_OUT),
    Fault("asleep in the data, zero 3", "asleep", "fsdp=4,zero=3", "stuck", place=True, says=("in data",), **GOES_OUT),
    Fault("computes for ever", "computes for ever", "dp=4", "stuck", says=LINE[:1], **GOES_OUT),
    Fault("SIGSTOP", "", "fsdp=2,tp=2", "stuck", says=("SIGSTOP",), struck=stop, steps=400, allowed=HANG),
    Fault("exception", "exception", "fsdp=2,tp=2", "died", place=True, says=("what is missing",)),
    Fault("exception in a pipeline", "exception", STAGES, "died", place=True, says=("what is missing",)),
    Fault("out of memory", "out of memory", "dp=4", "died", says=("SIGKILL", "memory"), started=confined),
    Fault("killed", "killed", "fsdp=4", "died", says=("SIGKILL", "not for want of memory")),
    Fault("left by sys.exit", "left", "dp=4", "died", place=True, says=("exit",)),
    Fault("slow backward", "slow backward", "dp=4", "slow", says=("backward",)),
    Fault("slow forward under tp", "slow forward", "fsdp=2,tp=2", "slow", says=("forward",)),
    Fault("slow forward under zero 3", "slow forward", "fsdp=4,zero=3,micro_batch=1", "slow", says=("forward",)),
    Fault("slow stage of a pipeline", "slow forward", STAGES, "slow", says=("forward",)),
    Fault("slow callback of one rank", "slow callback", "dp=4", "slow", says=("callbacks",)),
    Fault("a rank without a processor", "", "dp=4", "slow", struck=throttled, words=WIDE, steps=40,
          says=("processor",)),
    Fault("slow data", "slow data", "dp=4", "slow", None, says=("data",)),
    Fault("slow data of one rank", "slow data of one rank", "dp=4", "slow", says=("data",)),
    Fault("slow link", "", "dp=2", "slow", None, says=(r"\bdp\b", "node1", "node2"), started=OnHosts, words=WIDE,
          axis="dp", steps=12),
    Fault("nan in a module", "nan in a module", "dp=4", "wrong", says=(r"blocks\.2\.feed_forward",)),
    Fault("nan in a module, zero 3", "nan in a module", "fsdp=4,zero=3", "wrong", says=(r"blocks\.2\.feed_forward",)),
    Fault("nan once", "nan once", "dp=4", "wrong"),
    Fault("replica drift", "drift", "dp=4", "wrong", says=(r"blocks\.1\.feed_forward\.up_proj",)),
    Fault("loss spike", "loss spike", "dp=4", "wrong", None, says=("step 21", "loss"), words=("--set", "at=20"),
          steps=30),
    Fault("dead gradients", "dead gradients", "fsdp=4", "wrong", None, says=(r"blocks\.3\.feed_forward",)),
    Fault("a store that stalls", "", "dp=4", "slow", None, says=("checkpoint", r"\d s"),
          words=("--save-steps", "4", "--checkpoints", "slow://{folder}/kept")),
    Fault("recompiles every step", "recompiles", "dp=4", "slow", says=("compile",)),
]  # fmt: skip
WELL = [
    "dp=4", "fsdp=4,zero=1", "fsdp=4,zero=2", "fsdp=4,zero=3", "fsdp=2,tp=2", "dp=2,cp=2", "pp=2,dp=2,micro_batch=2",
    "pp=4,micro_batch=4,schedule=zb", "fsdp=4,ep=2", "dp=2,fsdp=2,tp=2",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="every third of them")
    parser.add_argument("--only", default="", help="those whose names have this word; several by commas")
    parser.add_argument("--keep", type=Path, help="leave the runs in this folder")
    given = parser.parse_args()
    chosen = FAULTS + [
        Fault(f"healthy {layout}", "", layout, "nothing", None, words=("--set", "experts=4") * ("ep" in layout))
        for layout in WELL
    ]
    if given.only:
        chosen = [each for each in chosen if any(word in each.name for word in given.only.split(","))]
    if given.quick:
        chosen = chosen[::3]
    if missing():
        print(f"without a slow link: {missing()}")
        chosen = [each for each in chosen if each.started is not OnHosts]
    results = []
    with folder_of(given.keep) as folder, ForkServer() as server:
        for fault in chosen:
            found = tried(fault, folder / re.sub(r"\W+", "-", fault.name), server)
            results.append(found)
            print(f"{found.name}: {'; '.join(found.wrong) or 'right'}, {found.seconds:.1f} s", flush=True)
            print(f"    {found.told['summary']}", flush=True)
    rows = [["fault", "verdict", "", "seconds"]]
    for each in results:
        rows.append([each.name, each.told["summary"][:90], "; ".join(each.wrong) or "right", f"{each.seconds:.1f}"])
    print("", *columns(rows, right=[3]), sep="\n")
    sick = [each for each in results if not each.name.startswith("healthy")]
    healthy = [each for each in results if each.name.startswith("healthy")]
    report(
        [
            Figure("faults with another verdict", failing(sick), 1, f"of {len(sick)}"),
            Figure("healthy runs with a verdict", failing(healthy), 0, f"of {len(healthy)}"),
            Figure("longest until a verdict", max((each.seconds for each in results), default=0.0), 10.0, "s"),
        ]
    )  # fmt: skip


def failing(results: list[Result]) -> int:
    return sum(bool(each.wrong) for each in results)


@contextmanager
def folder_of(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


if __name__ == "__main__":
    main()
