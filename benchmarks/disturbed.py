"""A run that is disturbed over a slow link, beside the same run left alone: is its loss curve unbroken?

    python benchmarks/disturbed.py [--only drop stall resize away] [--quick] [--out data.json]

Hosts are network namespaces joined by links of a given rate (needs root, ``ip`` and ``tc``), each with a supervisor and
a rank of ``phalanx train gpt``: the 10 million weights of `links.py`, 12 sequences of 48 bytes a step. Four blows:

- ``drop``: the link falls from 1 Gbit/s to 50 Mbit/s for good, under ``comm=auto``, which must adapt within 20 steps.
- ``stall``: one of two hosts, supervisor and rank, stands still for 20 s (SIGSTOP) under ``comm=int4``, and goes on.
- ``resize``: all are killed (SIGKILL), and the run is resumed on three hosts, then on one, under ``comm=int4``.
- ``away``: one of three sites cannot be reached for a minute under ``comm=diloco:16:int4``; the others train on.

Every step must be there once with the samples that it has in the run left alone. The curve counts as broken where the
mean loss of some 32 steps in a row is 5 % above that of the same steps there, and what is learned as lost where the
held-out loss is higher in the end by more than half a percent, or with sites by more than two.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.hosts import descendants, missing

import links
from phalanx import Run
from phalanx.local_updates import LocalUpdates
from phalanx.run import counted
from report import Figure, report
from slow_network import SlowNetwork

SHAPE = links.SHAPE | {"length": 48, "global_batch": 12}
SMALL = {"width": 64, "layers": 2, "heads": 2, "kv_heads": 2, "megabytes": 1.0}
MEETS_AT = "10.77.0.1:29400"
WINDOW = 32
"""Steps whose mean loss is compared: rounds of sites fit in."""
BREAKS, LOST, LOST_BY_SITES = 0.05, 0.005, 0.02
LONGEST = 1800.0
"""Seconds of a run, after which something hangs."""


class Trained:
    """A run on hosts, each with the same command."""

    def __init__(self, network: SlowNetwork, folder: Path, name: str, blow: Blow, shape: dict[str, Any]) -> None:
        self.network, self.folder, self.run = network, folder, Run(folder / name)
        settings = [word for field, value in shape.items() for word in ("--set", f"{field}={value}")]
        layout = f"dp={blow.hosts},comm={blow.comm}"
        self.first = ["gpt", *settings, "--layout", layout, "--steps", str(blow.steps), "--unchecked"]
        self.always = ["--run", name, "--device", "cpu", "--save-steps", "40", "--restarts", "9"]
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, places: range, resume: bool = False) -> None:
        """On these hosts; all of them meet at the first."""
        own = ["--resume"] if resume else self.first
        several = ["--max-nodes", str(len(places)), "--meet", MEETS_AT] if len(places) > 1 else []
        for place in places:
            where = ["--on", "local:1", *(["--host", f"node{place + 1}", *several] if several else [])]
            with (self.folder / f"{self.run.path.name} on node{place + 1}").open("ab") as out:
                self.processes[place] = self.network.start(
                    place, [sys.executable, "-m", "phalanx", "train", *own, *self.always, *where],
                    cwd=self.folder, stdout=out, stderr=subprocess.STDOUT,
                    env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                )  # fmt: skip

    def until(self, step: int) -> None:
        """So many steps have been done."""
        deadline = time.monotonic() + LONGEST
        while (last := self.run.last_step() if self.run.path.exists() else None) is None or last["step"] + 1 < step:
            self._look(deadline)
            time.sleep(0.1)

    def _look(self, deadline: float) -> None:
        if time.monotonic() > deadline or any(process.poll() for process in self.processes.values()):
            raise SystemExit(f"{self.run.path.name} has failed:\n{self.said()}")

    def said(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.folder.glob(f"{self.run.path.name} on *")))

    def ended(self) -> None:
        """All hosts have come to the end of the run."""
        deadline = time.monotonic() + LONGEST
        while any(process.poll() is None for process in self.processes.values()):
            self._look(deadline)
            time.sleep(0.2)
        self._look(deadline)

    def signal(self, number: int, *places: int) -> None:
        """To all processes of these hosts, or of all."""
        for place in places or tuple(self.processes):
            for pid in descendants(self.processes[place].pid):
                os.kill(pid, number)

    def killed(self) -> None:
        self.signal(signal.SIGKILL)
        for process in self.processes.values():
            process.wait()
        self.processes.clear()

    def close(self) -> None:
        for process in self.processes.values():
            for pid in descendants(process.pid) if process.poll() is None else ():
                os.kill(pid, signal.SIGKILL)
            process.wait()

    def steps(self) -> dict[int, dict[str, Any]]:
        return self.run.ledger()

    def losses(self) -> dict[int, float]:
        """Of steps, or of rounds of sites, by the last step of it."""
        rounds = counted(self.run.events(0, "start", "rollback", "round"), rounds=True)
        return {step: event["loss"] for step, event in (rounds or self.steps()).items()}

    def held_out(self) -> float:
        return float(list(self.run.events(0, "end"))[-1]["held_out"]["loss"])

    def stood(self) -> float:
        """The longest time from one step to the next."""
        times = [event["time"] for event in self.run.events(0, "step")]
        return max(late - early for early, late in pairwise(times))

    def worlds(self) -> list[int]:
        """How many ranks there were, generation by generation."""
        return [event["world"] for event in self.run.events(0, "start")]


def drop(trained: Trained, steps: int, seconds: float) -> None:
    trained.until(steps // 2)
    trained.network.shape(50)


def stall(trained: Trained, steps: int, seconds: float) -> None:
    trained.until(steps // 3)
    trained.signal(signal.SIGSTOP, 1)
    time.sleep(seconds)
    trained.signal(signal.SIGCONT, 1)


def resize(trained: Trained, steps: int, seconds: float) -> None:
    for part, hosts in ((1, 3), (2, 1)):
        trained.until(part * steps // 3)
        trained.killed()
        trained.start(range(hosts), resume=True)


def away(trained: Trained, steps: int, seconds: float) -> None:
    trained.until(steps // 5)
    trained.network.cut(2)
    time.sleep(seconds)
    trained.network.mend(2)


@dataclass(frozen=True)
class Blow:
    """What is done to a run."""

    name: str
    comm: str
    hosts: int
    mbits: float
    steps: int
    seconds: float
    do: Callable[[Trained, int, float], None]


BLOWS = (
    Blow("drop", "auto", 2, 1000, 300, 0, drop),
    Blow("stall", "int4", 2, 100, 300, 20, stall),
    Blow("resize", "int4", 2, 100, 300, 0, resize),
    Blow("away", "diloco:16:int4", 3, 100, 960, 60, away),
)
QUICK = replace(BLOWS[1], steps=60, seconds=8)


def trained(folder: Path, blow: Blow, calm: bool, shape: dict[str, Any]) -> Trained:
    """A run, left alone or not."""
    name = f"{blow.name}-{'calm' if calm else 'disturbed'}"
    with SlowNetwork(3, folder, blow.mbits) as network:
        run = Trained(network, folder, name, blow, shape)
        try:
            run.start(range(blow.hosts))
            if not calm:
                blow.do(run, blow.steps, blow.seconds)
            run.ended()
        finally:
            run.close()
    print(f"{name}: {blow.steps} steps, ranks {run.worlds()}, held out {run.held_out():.4f}", flush=True)
    return run


def worst(rough: dict[int, float], calm: dict[int, float]) -> tuple[float, int]:
    """How far the mean loss of a window is above that of the same steps left alone at most, and where it ends."""
    found = [(0.0, 0)]
    ends = sorted(rough.keys() & calm.keys())
    for end in ends:
        own = [step for step in ends if end - WINDOW < step <= end]
        if end + 1 >= WINDOW:
            means = [statistics.mean(losses[step] for step in own) for losses in (rough, calm)]
            found.append((means[0] / means[1] - 1, end + 1))
    return max(found)


def figures(blow: Blow, rough: Trained, calm: Trained) -> Iterator[Figure]:
    ours, theirs = rough.steps(), calm.steps()
    wrong = [step for step in theirs if step not in ours or ours[step]["samples"] != theirs[step]["samples"]]
    note = f"ranks {rough.worlds()}, stood still for {rough.stood():.1f} s at most"
    yield Figure(f"{blow.name}: steps that are not there with their samples", len(wrong), 0, note)
    above, end = worst(rough.losses(), calm.losses())
    note = f"in {WINDOW} steps up to {end}" if end else "nowhere above it"
    yield Figure(f"{blow.name}: loss above that of the run left alone, at most", above, BREAKS, note)
    higher = rough.held_out() / calm.held_out() - 1
    note = f"{rough.held_out():.4f} to {calm.held_out():.4f}"
    bar = LOST_BY_SITES if LocalUpdates.parse(blow.comm) else LOST
    yield Figure(f"{blow.name}: held-out loss above it", higher, bar, note)
    if blow.name == "drop":
        yield adapted(rough)


def adapted(rough: Trained) -> Figure:
    """Steps that took as long as on the slow link, until another method was chosen."""
    seconds = {step: event["time"] for step, event in rough.steps().items()}
    length = {step: seconds[step] - seconds[step - 1] for step in seconds if step - 1 in seconds}
    half = max(length) // 2
    usual = statistics.median(length[step] for step in length if half // 2 < step < half)
    first = next((step for step in sorted(length) if step >= half and length[step] > 1.5 * usual), half)
    chosen = [event for event in rough.run.events(0, "comm") if event["step"] >= first]
    took = chosen[0]["step"] - first if chosen else max(length) - first
    said = f"{chosen[0]['method']} instead of {chosen[0]['before']}" if chosen else "nothing else was chosen"
    return Figure("drop: steps until another method is chosen", took, links.ADAPTS, said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[blow.name for blow in BLOWS], help="these blows")
    parser.add_argument("--quick", action="store_true", help="a host that stalls alone, and a small model")
    parser.add_argument("--out", type=Path, help="a JSON file of the losses, disturbed and left alone")
    options = parser.parse_args()
    if missing():
        sys.exit(f"not run: {missing()}")
    found, curves = list[Figure](), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        for blow in [QUICK] if options.quick else BLOWS:
            if options.only and blow.name not in options.only:
                continue
            shape = SHAPE | (SMALL if options.quick else {})
            calm, rough = (trained(Path(folder), blow, alone, shape) for alone in (True, False))
            found += figures(blow, rough, calm)
            curves[blow.name] = {"calm": calm.losses(), "disturbed": rough.losses()}
    if options.out:
        options.out.write_text(json.dumps(curves))
    report(found)


if __name__ == "__main__":
    main()
