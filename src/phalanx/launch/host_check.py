"""Before anything is started on hosts: is each of them reached, alike and roomy enough, and do they see each other?

Every host is asked at once, and everything that is wrong is told at once, each with its host.
"""

from __future__ import annotations

import secrets
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from phalanx.errors import CannotHere
from phalanx.launch import host_side
from phalanx.launch.host_side import Facts
from phalanx.launch.ssh import SshHost, Unreached, read
from phalanx.words import columns, in_bytes, listed, many

CLOCK_SECONDS = 5.0
"""Clocks that are further apart are wrong."""
MEMORY_A_RANK, SHARED_A_RANK, DISK = 256 << 20, 16 << 20, 256 << 20
"""Bytes without which nothing trains, of memory and of shared memory a rank, and where the run's folder is."""
MOST_FILES = 3
T = TypeVar("T")


@dataclass
class HostCheck:
    """What is asked of hosts, what they say, and what is wrong with each."""

    remotes: Sequence[SshHost]
    gpus: int
    folder: Path
    """Where the command is run."""
    run: Path
    files: Mapping[str, str]
    """The task's, by full path, with what they hold here."""
    path: Sequence[str]
    """Where modules are looked for beside the interpreter's own."""
    checkpoints: str | None = None
    """Where those go, if it is not the run's folder."""
    copy: bool = False
    """Whether the task's code is to be sent."""
    wrong: list[tuple[str, str]] = field(default_factory=list)
    """A host, and what."""
    facts: dict[str, Facts] = field(default_factory=dict)
    port: int = 0
    """Where they can meet."""
    unshared: list[str] = field(default_factory=list)
    """Hosts that do not see the run's folder, where they need not."""

    def look(self) -> None:
        """Ask every host what it is like; what is wrong is noted."""
        request: Facts = {
            "do": "look", "path": list(self.path), "run": str(self.run), "gpus": self.gpus, "folder": str(self.folder),
            "files": list(self.files),
        }  # fmt: skip
        here = host_side.look({**request, "path": [], "gpus": 0, "files": []})
        for remote, found in zip(
            self.remotes, at_once(lambda remote: _asked(remote, request), self.remotes), strict=True
        ):
            if isinstance(found, Unreached):
                self.wrong.append((remote.name, str(found)))
                continue
            facts, early, late = found
            facts["ahead"] = max(0.0, facts["time"] - late) - max(0.0, early - facts["time"])
            self.facts[remote.name] = facts
            self.wrong += [(remote.name, text) for text in self._compared(remote, facts, here)]
        self._look_at_code()

    def table(self) -> str:
        """A line a host."""
        rows = []
        for remote in self.remotes:
            facts = self.facts.get(remote.name)
            amiss = any(name == remote.name for name, _ in self.wrong)
            rows.append(
                (f"  hosts  {remote.name}", *(_shown(remote, facts) if facts else ("",) * 6), "!" if amiss else "ok")
            )
        return "\n".join(columns(rows))

    def meet(self, address: str, ports: Sequence[int]) -> None:
        """Have the first host listen at one of some ports and leave marks, and the others connect and look for them."""
        first = self.remotes[0]
        needed = self.checkpoints or str(self.run)
        folders = [str(self.run), *([needed] if needed != str(self.run) and "://" not in needed else [])]
        request: Facts = {
            "do": "open", "mark": f".met-{secrets.token_hex(8)}", "ports": list(ports),
            "folders": folders,
        }  # fmt: skip
        with first.start(request) as process:
            try:
                opened = _first_answer(process)
                self.port = opened["port"] or 0
                for folder, why in opened["refused"].items():
                    self.wrong.append((first.name, f"cannot write to {folder}: {why}. Give --run another folder"))
                if ports and not self.port:
                    taken = f"port {ports[0]} is taken ({opened['busy']}). Give another with port="
                    self.wrong.append((first.name, taken))
                there = {"address": address, "port": self.port, "refused": list(opened["refused"])}
                self._reach({**request, **there, "do": "reach"}, needed)
            finally:
                assert process.stdin is not None
                process.stdin.close()

    def refuse(self) -> None:
        """Everything that is wrong, in one message."""
        if not self.wrong:
            return
        lines = "".join(f"\n  {name}: {text}." for name, text in self.wrong)
        number = many(len({name for name, _ in self.wrong}), "host")
        raise CannotHere(
            f"{number} cannot take part:{lines}\nNothing was started. Mend that, or leave them out of --on."
        )

    def _compared(self, remote: SshHost, facts: Facts, here: Facts) -> list[str]:
        """What is wrong with a host by itself."""
        wrong = []
        if facts["python"] != here["python"]:
            wrong.append(
                f"{remote.python} is Python {facts['python']}, and here it is {here['python']}. Install the same, or "
                "name another interpreter there with python="
            )
        for name in ("torch", "phalanx"):
            if facts[name] is None:
                wrong.append(
                    f"{remote.python} has no {name}. Install {name} {here[name]} there, or name another python="
                )
            elif facts[name] != here[name]:
                wrong.append(f"has {name} {facts[name]}, and here it is {here[name]}. Install the same")
        if facts["phalanx"] == here["phalanx"] and facts["source"] != here["source"]:
            wrong.append(f"has another source of phalanx {here['phalanx']} than is here. Install the same")
        if abs(facts["ahead"]) > CLOCK_SECONDS:
            by = f"{abs(facts['ahead']):,.0f} s {'ahead' if facts['ahead'] > 0 else 'behind'}"
            wrong.append(f"its clock is {by}. Set it, e.g. with timedatectl set-ntp true")
        for what, least in self._least(remote).items():
            if facts[what] is not None and facts[what] < least:
                wrong.append(f"has {in_bytes(facts[what])} of {what} free, and {in_bytes(least)} are needed. Make room")
        if facts["gpus"] < self.gpus:
            wrong.append(f"has {many(facts['gpus'], 'GPU')}, and gpus={self.gpus} asks for more. Ask for those it has")
        return wrong

    @staticmethod
    def _least(remote: SshHost) -> dict[str, int]:
        several = SHARED_A_RANK * remote.ranks if remote.ranks > 1 else 0
        return {"memory": MEMORY_A_RANK * remote.ranks, "shared memory": several, "disk": DISK}

    def _look_at_code(self) -> None:
        """Where a host has not all of the task's files, they are sent to all; where it has others, somebody chooses."""
        missing = {name for name, facts in self.facts.items() if not facts["folder"] or None in facts["files"].values()}
        if self.copy or missing:
            self.copy = True
            return
        for name, facts in self.facts.items():
            other = [Path(path).name for path, known in facts["files"].items() if known != self.files[path]]
            if other:
                held = f"holds something else in {listed(other, MOST_FILES)} than is here"
                self.wrong.append((name, f"{held}. Bring that up to date, or send the code with code=copy"))

    def _reach(self, request: Facts, needed: str) -> None:
        first, *others = self.remotes
        found = at_once(lambda remote: _asked(remote, {**request, "name": remote.name}), others)
        where = f"{request['address']}:{request['port']}"
        for remote, told in zip(others, found, strict=True):
            if isinstance(told, Unreached):
                self.wrong.append((remote.name, str(told)))
                continue
            facts = told[0]
            if facts["port"]:
                advice = "Open that port, give another with port=, or another address with --meet"
                unreached = f"does not reach host {first.name} at {where}: {facts['port']}. {advice}"
                self.wrong.append((remote.name, unreached))
            seen = {folder: known for folder, known in facts["folders"].items() if folder not in request["refused"]}
            if not seen.get(needed, True):
                advice = "Give --run a folder that all hosts share, or --checkpoints one or a store that all reach"
                unseen = f"does not see what host {first.name} writes to {needed}, or cannot write there. {advice}"
                self.wrong.append((remote.name, unseen))
            elif not all(seen.values()):
                self.unshared.append(remote.name)


def _shown(remote: SshHost, facts: Facts) -> tuple[str, ...]:
    room = tuple(f"{in_bytes(facts[what])} {what}" if facts[what] is not None else "" for what in ("memory", "disk"))
    ranks = many(remote.ranks, "rank") + (f", {many(facts['gpus'], 'GPU')}" if facts["gpus"] else "")
    clock = f"clock {facts['ahead']:+.0f} s" if abs(facts["ahead"]) > CLOCK_SECONDS else "clock right"
    return f"Python {facts['python']}", f"torch {facts['torch']}", ranks, *room, clock


def _asked(remote: SshHost, request: Facts) -> tuple[Facts, float, float] | Unreached:
    """An answer, and when it can have been given."""
    early = time.time()
    try:
        return remote.ask(request), early, time.time()
    except Unreached as error:
        return error


def at_once(ask: Callable[[SshHost], T], remotes: Sequence[SshHost]) -> list[T]:
    """What each host says, in their order."""
    with ThreadPoolExecutor(max(1, len(remotes))) as threads:
        return list(threads.map(ask, remotes))


def _first_answer(process: subprocess.Popen[bytes]) -> Facts:
    assert process.stdout is not None
    assert process.stderr is not None
    for line in iter(process.stdout.readline, b""):
        if (found := read(line.decode(errors="replace"))) is not None:
            return found
    said = process.stderr.read().decode(errors="replace").strip().splitlines()
    raise Unreached(f"the first host does not answer any more: {said[-1] if said else 'ssh ended'}. Start again.")
