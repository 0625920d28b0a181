"""Blows at random moments: does a run that is hit end with the bits and samples of one that is not?

python benchmarks/chaos.py [--quick] [--kills N] [--seed S] [--layout L]

Ranks of one run are killed with -9 at random moments, also while checkpoints are written and let go (every second step
here); other runs have their supervisor killed, get SIGTERM, or have a rank stopped. Each is held against a run that was
left alone: hash of the whole state, and the samples and losses of every step from the event log.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from phalanx.run import Run
from report import Figure, report

EXAMPLE = Path(__file__).parents[1] / "examples" / "spirals.py"
PHALANX = [sys.executable, "-m", "phalanx.cli"]


def ranks_of(pid: int) -> list[int]:
    """A supervisor's ranks."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout.split()
    return [int(word) for word in found]


class Chaos:
    """Runs of one task in one layout."""

    def __init__(self, folder: Path, layout: str, steps: int) -> None:
        self.folder = folder
        self.words = [
            str(EXAMPLE), "--layout", layout, "--steps", str(steps), "--save-steps", "2", "--keep", "1",
            "--memory-steps", "3", "--restarts", "50",
        ]  # fmt: skip

    def start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        out = (self.folder / f"{name}.out").open("ab")
        command = [*PHALANX, "train", *(words or self.words), "--run", str(self.folder / name)]
        with out:
            return subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def same(self, name: str) -> bool:
        """Whether a run ended as the one that was left alone."""
        one, other = Run(self.folder / name), Run(self.folder / "calm")
        if not one.certificate_path.exists():
            return False
        found, expected = (json.loads(run.certificate_path.read_text()) for run in (one, other))
        steps, wanted = one.ledger(), other.ledger()
        return (
            found["state"] == expected["state"]
            and found["samples"] == expected["samples"]
            and all(
                (steps[n]["samples"], steps[n]["loss"]) == (wanted[n]["samples"], wanted[n]["loss"]) for n in wanted
            )
        )

    def until(self, name: str, step: int, process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None and max(Run(self.folder / name).ledger(), default=0) < step:
            time.sleep(0.05)


def killed(chaos: Chaos, kills: int, seed: int) -> tuple[int, int, bool]:
    """Kills that hit, generations that were needed, and whether the end is the same."""
    chosen, done = random.Random(seed), 0
    process = chaos.start("killed")
    while process.poll() is None and done < kills:
        time.sleep(chosen.uniform(0.0, 1.5))
        ranks = ranks_of(process.pid)
        if ranks:
            try:
                os.kill(chosen.choice(ranks), signal.SIGKILL)
                done += 1
            except ProcessLookupError:
                pass
    code = process.wait()
    return done, Run(chaos.folder / "killed").generation(), code == 0 and chaos.same("killed")


def struck(chaos: Chaos, name: str, blow: Callable[[subprocess.Popen[bytes]], None], resume: bool) -> bool:
    process = chaos.start(name)
    chaos.until(name, 40, process)
    blow(process)
    code = process.wait()
    if resume:
        code = chaos.start(name, "--resume").wait()
    return code == 0 and chaos.same(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layout", default="dp=2,fsdp=2")
    given = parser.parse_args()
    kills = 6 if given.quick else given.kills
    with tempfile.TemporaryDirectory() as folder:
        chaos = Chaos(Path(folder), given.layout, 300 if given.quick else 2500)
        assert chaos.start("calm").wait() == 0, (Path(folder) / "calm.out").read_text()
        done, generations, same = killed(chaos, kills, given.seed)
        print((Path(folder) / "killed.out").read_text()[-2000:])
        figures = [
            Figure(
                "kills -9 that were not survived to the bit",
                float(not same),
                0,
                f"{done} kills, {generations} generations",
            ),
            Figure("kills left out", kills - done, 0, "the run was over before"),
        ]
        for name, blow, resume in (
            ("supervisor killed", lambda p: p.kill(), True),
            ("SIGTERM", lambda p: p.terminate(), True),
            ("a rank stopped", lambda p: os.kill(ranks_of(p.pid)[0], signal.SIGSTOP), False),
        ):
            figures.append(
                Figure(f"{name}: not the same", float(not struck(chaos, name.replace(" ", "-"), blow, resume)), 0)
            )
    report(figures)


if __name__ == "__main__":
    main()
