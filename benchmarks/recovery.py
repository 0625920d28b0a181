"""How long a job stands still when a rank is killed, against torchrun's restarts.

    python benchmarks/recovery.py [--quick] [--only 2|4]

Ranks of this machine train the same small task; at random moments a random one is killed (kill -9). Measured by the
times in the event log, from the kill to the end of the next step that is done. Under torchrun the same engine runs in a
loop of one's own that saves with torch.save every few steps, as often as ours keeps its state in memory; torchrun gets
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which its restarted ranks look for each other at dead addresses. Both take
turns, several kills a turn.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from report import Figure, report

SECONDS_BAR = 2.0
"""And two steps."""
TORCHRUN_BAR = 0.5
DETECTION_BAR = 1.0
KEEP_STEPS = 5
PATIENCE = 120.0

TASK = """
from dataclasses import dataclass
from phalanx.recipes.gpt import GPT

@dataclass
class Task(GPT):
    global_batch: int = 8
    megabytes: float = 1.0
    steps: int = 1_000_000

    def held_out(self):
        return None
"""

PROGRAM = Path(__file__).with_name("restarted.py")


@dataclass
class Recovery:
    """One kill, in seconds after it; ``step`` is what a step took before it."""

    step: float
    known: float
    """The supervisor has noted the failure; torchrun notes none."""
    restored: float
    stepped: float


class Job:
    """A job under way in a folder of its own."""

    def __init__(self, ours: bool, ranks: int, folder: Path) -> None:
        self.path, self.ranks = folder, ranks
        python = [sys.executable, "-m"]
        if ours:
            place = ["--on", f"local:{ranks}", "--device", "cpu", "--run", "run"]
            command = [*python, "phalanx", "train", "task.py", *place, "--memory-steps", str(KEEP_STEPS)]
        else:
            restarts = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "1000"]
            command = [*python, "torch.distributed.run", *restarts, str(PROGRAM), ".", str(KEEP_STEPS)]
        (folder / "task.py").write_text(TASK)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.output = (folder / "output").open("w")
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=self.output, stderr=self.output, start_new_session=True
        )

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """All ranks' events, the oldest first."""
        found = []
        for path in self.path.glob("run/events/*.jsonl"):
            lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            found += [event for event in lines if event["kind"] in kinds]
        return sorted(found, key=lambda event: event["time"])

    def steps_since(self, moment: float) -> list[float]:
        """When steps of ranks that started after a moment were done, as the last rank did them."""
        starts = [event["time"] for event in self.events("start") if event["time"] > moment]
        if len(starts) < self.ranks:
            return []
        done = [event["time"] for event in self.events("step") if event["time"] > starts[-1]]
        return done[self.ranks - 1 :: self.ranks]

    def wait(self, moment: float, steps: int) -> list[float]:
        deadline = time.monotonic() + PATIENCE
        while len(found := self.steps_since(moment)) < steps:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"the job does not go on:\n{(self.path / 'output').read_text()[-4000:]}")
            time.sleep(0.05)
        return found

    def kill(self) -> Recovery:
        """Kill a random rank at a random moment and wait until the job has gone on for some steps."""
        time.sleep(random.uniform(0.2, 1.2))
        before = self.steps_since(0.0)[-20:]
        moment = time.time()
        os.kill(random.choice(_children(self.process.pid)), signal.SIGKILL)
        done = self.wait(moment, 4)
        known = [event["time"] for event in self.events("failure") if event["time"] > moment]
        restored = [event["time"] for event in self.events("start") if event["time"] > moment]
        step = statistics.median(b - a for a, b in pairwise(before))
        return Recovery(
            step, min(known, default=moment) - moment, max(restored[: self.ranks]) - moment, done[0] - moment
        )

    def end(self) -> None:
        """Stop it, with every process of its session."""
        ranks = _children(self.process.pid)
        self.process.kill()
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)
        self.process.wait()
        self.output.close()


def _children(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, owner = path.read_text().rsplit(")", 1)[1].split()[:2]
        except OSError:  # it ended in this moment
            continue
        if int(owner) == parent and state != "Z":
            found.append(int(path.parent.name))
    return found


def turn(ours: bool, ranks: int, kills: int) -> list[Recovery]:
    with tempfile.TemporaryDirectory() as folder:
        job = Job(ours, ranks, Path(folder))
        try:
            job.wait(0.0, 8)
            return [job.kill() for _ in range(kills)]
        finally:
            job.end()


def figures(ranks: int, quick: bool) -> Iterator[Figure]:
    turns, kills = (1, 3) if quick else (3, 4)
    found: dict[bool, list[Recovery]] = {True: [], False: []}
    for _ in range(turns):
        for ours in (True, False):
            found[ours] += turn(ours, ranks, kills)

    def middle(ours: bool, name: str) -> float:
        return statistics.median(getattr(recovery, name) for recovery in found[ours])

    seconds, theirs, step = middle(True, "stepped"), middle(False, "stepped"), middle(True, "step")
    worst = max(recovery.stepped for recovery in found[True])
    known, restored = middle(True, "known"), middle(True, "restored")
    where = f"{ranks} ranks: from a kill to"
    note = f"steps of {step * 1e3:.0f} ms; worst {worst:.2f} s, median of {turns * kills} kills"
    yield Figure(f"{where} the next step's end, s", seconds, SECONDS_BAR + 2 * step, note)
    spread = f"{min(r.stepped for r in found[False]):.2f} to {max(r.stepped for r in found[False]):.2f} s"
    yield Figure(f"{where} that, to torchrun", seconds / theirs, TORCHRUN_BAR, f"{theirs:.2f} s; {spread}")
    slowest = max(recovery.known for recovery in found[True])
    yield Figure(f"{where} its being known, s", known, DETECTION_BAR, f"worst {slowest:.2f} s")
    yield Figure(f"{where} all ranks' state restored, s", restored)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a rough answer in under a minute")
    parser.add_argument("--only", choices=["2", "4"], help="on so many ranks")
    options = parser.parse_args()
    chosen = [int(options.only)] if options.only else [2] if options.quick else [2, 4]
    report([figure for ranks in chosen for figure in figures(ranks, options.quick)])


if __name__ == "__main__":
    main()
