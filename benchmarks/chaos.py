"""Blows at random moments: does a run that is hit end with the bits and samples of one that is not?

python benchmarks/chaos.py [--quick] [--only kills|signals|saves] [--kills N] [--bursts N] [--seed S] [--layout L]

Ranks of one run are killed with -9 at random moments, also while checkpoints are written and let go (every second step
here); other runs have their supervisor killed, get SIGTERM, or have a rank stopped. Each is held against a run that was
left alone: hash of the whole state, and the samples and losses of every step from the event log.

Bursts of one to five signals (SIGTERM, SIGINT, SIGHUP, SIGUSR1, 0 to 50 ms apart), to the supervisor or to all its
processes, come at random moments of start-up, training and saving. What a run that was stopped says is saved and lost
is held against its checkpoints and events; it is resumed, and stopped again, until it is done.

Supervisors are killed with -9 while a checkpoint is written, at a random moment from its first file to the one when
older checkpoints have been let go. After each kill the newest checkpoint must be whole and none may be older than what
was committed before; then the run goes on from it, and is killed again, until it is done.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from phalanx import cli
from phalanx.checkpoint.manager import CheckpointManager
from phalanx.checkpoint.manifest import Damaged
from phalanx.checkpoint.store import open_store
from phalanx.launch.forkserver import Forked, ForkServer
from phalanx.run import Run
from report import Figure, report

EXAMPLE = Path(__file__).parents[1] / "examples" / "spirals.py"
PHALANX = [sys.executable, "-m", "phalanx"]


def ranks_of(pid: int) -> list[int]:
    """A supervisor's ranks."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout.split()
    return [int(word) for word in found]


class Chaos:
    """Runs of one task in one layout."""

    def __init__(self, folder: Path, layout: str, steps: int, *more: str) -> None:
        self.folder = folder
        self.words = [
            str(EXAMPLE), "--layout", layout, "--steps", str(steps), "--save-steps", "2", "--keep", "1",
            "--memory-steps", "3", "--restarts", "50", *more,
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
        run = Run(self.folder / name)
        while process.poll() is None and (not run.path.exists() or max(run.ledger(), default=0) < step):
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


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
LONGEST = 120.0
"""Seconds until a run that was asked to stop must have ended."""


def command(words: list[str], out: str) -> None:
    """The command line, in a process that a warm one was forked into."""
    descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.argv = ["phalanx", "train", *words]
    cli.main()


@dataclass
class Bursts:
    """Runs that get bursts of signals, one after the other, each until it is done."""

    chaos: Chaos
    server: ForkServer
    chosen: random.Random
    moments: float = 4.0
    """Seconds after a start or a burst that the next may come."""
    bursts: int = 0
    signals: int = 0
    stopped: int = 0
    stepped: int = 0
    """Of those, after a step or more."""
    said: int = 0
    """Steps that runs said were lost,"""
    unsaid: int = 0
    """and those that were lost besides."""
    untrue: int = 0
    """Certificates of runs that were not done, and ends that nothing was said about."""
    runs: int = 0
    different: int = 0
    read: int = 0
    """Events of the run that were judged before."""

    def strike(self, bursts: int) -> None:
        """Go on until there were so many."""
        while self.bursts < bursts:
            name = f"burst-{self.runs}"
            words = self.chaos.words
            while not Run(self.chaos.folder / name).certificate_path.exists():
                self._stop_or_finish(name, words, bursts)
                words = ["--resume"]
                if not (self.chaos.folder / name / "run.toml").exists():
                    words = self.chaos.words  # it was stopped before it had a folder
            self.runs, self.read = self.runs + 1, 0
            self.different += not self.chaos.same(name)

    def _stop_or_finish(self, name: str, words: list[str], bursts: int) -> None:
        run, out = Run(self.chaos.folder / name), self.chaos.folder / f"{name}.out"
        process = self.server.fork(command, [*words, "--run", str(run.path)], str(out))
        asked = False
        while process.is_alive() and not asked and self.bursts < bursts:
            time.sleep(self.chosen.uniform(0, self.moments))
            asked = self._burst(process)
        process.join(LONGEST if asked else None)
        if process.is_alive():
            process.kill()
            self.untrue += 1
        process.join()
        self._judge(run, out.read_text() if out.exists() else "", process.exitcode)

    def _burst(self, process: Forked) -> bool:
        """Whether it asked for an end."""
        kinds = [self.chosen.choice(SIGNALS) for _ in range(self.chosen.randint(1, 5))]
        everybody = self.chosen.random() < 0.5  # as schedulers and terminals do
        for kind in kinds:
            for pid in [process.pid, *(ranks_of(process.pid) if everybody else [])]:
                with suppress(ProcessLookupError):
                    os.kill(pid, kind)
            time.sleep(self.chosen.uniform(0, 0.05))
        self.bursts += 1
        self.signals += len(kinds)
        return any(kind != signal.SIGUSR1 for kind in kinds)

    def _judge(self, run: Run, told: str, code: int | None) -> None:
        """Hold what was said against what is there."""
        steps = CheckpointManager(open_store(run.checkpoints_path)).steps() if run.checkpoints_path.exists() else []
        events = list(run.events(0, "step")) if run.path.exists() else []
        done = max((event["step"] + 1 for event in events[self.read :]), default=0)  # also what was not taken up again
        self.read, saved = len(events), max(steps, default=0)
        if run.certificate_path.exists():
            certified = json.loads(run.certificate_path.read_text())["steps"]
            self.untrue += not (certified == max(run.ledger()) + 1 == saved and run.weights_path.exists())
            return
        self.stopped += 1
        self.stepped += bool(done)
        unheeded = code is not None and code < 0 and not told  # it came before the command line was there
        if "stopped" not in told and not unheeded:
            print(f"it ended with {code} and said:\n{told}")
            self.untrue += 1
        found = re.search(r"(\d[\d,]*) steps? (?:after it )?lost", told)
        said = int(found[1].replace(",", "")) if found else 0
        named = re.search(r"saved up to step (\d+)", told)
        self.untrue += named is not None and int(named[1]) != saved
        self.said += said
        self.unsaid += max(0, done - saved - said)
        if done - saved > said:
            print(f"{done} steps done, {saved} saved, {said} said to be lost:\n{told}")


def bursts(chaos: Chaos, server: ForkServer, wanted: int, seed: int) -> list[Figure]:
    found = Bursts(chaos, server, random.Random(seed))
    found.strike(wanted)
    note = f"{found.bursts} bursts, {found.signals} signals, {found.stopped} stops, {found.stepped} of them after steps"
    return [
        Figure("bursts of signals: steps lost that were not said to be", found.unsaid, 0, note),
        Figure("bursts of signals: steps said to be lost", found.said, 0),
        Figure("bursts of signals: what was said or certified and was not so", found.untrue, 0),
        Figure("bursts of signals: runs that did not end the same", found.different, 0),
    ]


@dataclass
class KilledSaves:
    """Runs whose supervisors are killed while they save, one after the other, each until it is done."""

    chaos: Chaos
    server: ForkServer
    chosen: random.Random
    seconds: float = 0.2
    """That a save takes, as the last ones did."""
    kills: int = 0
    runs: int = 0
    different: int = 0
    lost: int = 0
    """Kills after which the newest checkpoint was older than before."""
    torn: int = 0
    """Kills after which it was not whole."""
    moments: Counter[str] = field(default_factory=Counter)
    """How far the save was that each kill came into."""

    def strike(self, kills: int) -> None:
        """Go on until there were so many."""
        while self.kills < kills:
            name = f"saves-{self.runs}"
            run, words = Run(self.chaos.folder / name), self.chaos.words
            while not run.certificate_path.exists():
                out = self.chaos.folder / f"{name}.out"
                process = self.server.fork(command, [*words, "--run", str(run.path)], str(out))
                if self.kills < kills:
                    self._kill_in_a_save(process, run)
                process.join()
                if process.exitcode not in (0, -signal.SIGKILL):
                    raise SystemExit(f"{name} ended with {process.exitcode}: {out.read_text()}")
                words = ["--resume"] if run.settings_path.exists() else words
            self.runs += 1
            self.different += not self.chaos.same(name)

    def _kill_in_a_save(self, process: Forked, run: Run) -> None:
        """After a few saves, at a random moment of the next one; not if the run is over before."""
        manager, few = CheckpointManager(open_store(run.checkpoints_path)), self.chosen.randint(0, 3)
        seen = set(self._unfinished(manager))
        while process.is_alive():
            new = set(self._unfinished(manager)) - seen
            if not new:
                time.sleep(0.001)
                continue
            seen |= new
            began, few = time.monotonic(), few - 1
            if few >= 0:
                while new & set(self._unfinished(manager)) and process.is_alive():
                    time.sleep(0.001)
                self.seconds = (self.seconds + time.monotonic() - began) / 2
                continue
            time.sleep(self.chosen.uniform(0, 1.3 * self.seconds))
            before = max(manager.steps(), default=0)
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            self.moments[self._moment(run.checkpoints_path)] += 1
            process.join()
            self.kills += 1
            self._judge(manager, before)
            return

    def _unfinished(self, manager: CheckpointManager) -> list[str]:
        with suppress(FileNotFoundError):  # it was committed between two looks
            return manager.leftovers()
        return []

    def _moment(self, folder: Path) -> str:
        """By what lies there."""
        files = {path.name for path in folder.glob(".writing-*/step-*/*")}
        parts = sum(name.startswith("part-") and name.endswith(".json") for name in files)
        if any(folder.glob(".removed-*")):
            return "while older ones went"
        if not files:
            return "before the first file or after the commit"
        return "in the manifest" if any("manifest" in name for name in files) else f"after {parts} parts"

    def _judge(self, manager: CheckpointManager, before: int) -> None:
        time.sleep(0.3)  # for ranks to have ended with their supervisor
        newest = max(manager.steps(), default=0)
        self.lost += newest < before
        try:
            self.torn += bool(newest and list(manager.open(newest).verify()))
        except Damaged as damage:
            print(damage)
            self.torn += 1


def saves(chaos: Chaos, server: ForkServer, wanted: int, seed: int) -> list[Figure]:
    assert chaos.start("calm").wait() == 0, (chaos.folder / "calm.out").read_text()
    found = KilledSaves(chaos, server, random.Random(seed))
    found.strike(wanted)
    moments = ", ".join(f"{count} {moment}" for moment, count in sorted(found.moments.items()))
    note = f"{found.kills} kills in {found.runs} runs: {moments}"
    return [
        Figure("supervisor killed in a save: runs that did not end the same", found.different, 0, note),
        Figure("supervisor killed in a save: checkpoints lost", found.lost, 0),
        Figure("supervisor killed in a save: newest checkpoint not whole", found.torn, 0),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=["kills", "signals", "saves"])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--bursts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layout", default="dp=2,fsdp=2")
    given = parser.parse_args()
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder, ForkServer() as server:
        if given.only != "saves":
            chaos = Chaos(Path(folder), given.layout, 300 if given.quick else 2500)
            assert chaos.start("calm").wait() == 0, (Path(folder) / "calm.out").read_text()
        if given.only in (None, "kills"):
            figures += blows(chaos, 6 if given.quick else given.kills, given.seed)
        if given.only in (None, "signals"):
            figures += bursts(chaos, server, 10 if given.quick else given.bursts, given.seed)
        if given.only in (None, "saves"):
            (Path(folder) / "saves").mkdir()
            large = Chaos(Path(folder) / "saves", given.layout, 60 if given.quick else 150, "--set", "width=512")
            figures += saves(large, server, 5 if given.quick else given.kills, given.seed)
    report(figures)


def blows(chaos: Chaos, kills: int, seed: int) -> list[Figure]:
    done, generations, same = killed(chaos, kills, seed)
    print((chaos.folder / "killed.out").read_text()[-2000:])
    figures = [
        Figure(
            "kills -9 that were not survived to the bit", float(not same), 0, f"{done} kills, {generations} generations"
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
    return figures


if __name__ == "__main__":
    main()
