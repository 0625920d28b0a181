"""Stacks of ranks, without the help of whatever they are stuck in.

A rank has Python's own handler write its stacks to memory that its supervisor lends, from inside a signal: no thread of
its own has to come to anything. One that the system has stopped cannot answer, and is said to be stopped.
"""

from __future__ import annotations

import faulthandler
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from phalanx import flight
from phalanx.errors import CannotHere
from phalanx.files import write_whole
from phalanx.folder_files import BadFile, make_folder
from phalanx.launch import belonging
from phalanx.launch.heartbeats import family, state_of
from phalanx.redact import redact
from phalanx.run import Run, holder

SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""Asks a rank for its stacks, and a supervisor for those of all its ranks. Schedulers and JVMs have uses of their own
for SIGUSR1 and 2; of the real-time signals, which Linux has, nobody is known to use this one."""
ANSWER_SECONDS, QUIET_SECONDS = 1.0, 0.05
"""How long an answer is waited for, and after what silence it is whole."""
ALL_SECONDS = 10.0
"""For how long a host's ranks are asked; those that are left then are not."""
NATIVE_SECONDS = 5.0
ASKED_SECONDS = 20.0
"""How long whoever asks a supervisor waits for its files."""
FATAL = "Fatal Python error"
"""How what Python writes begins when a signal ends it."""
STATES = {
    "T": "stopped (SIGSTOP), state T", "t": "stopped by a debugger, state t",
    "D": "waiting for a device or a file system, state D",
    "Z": "ended, state Z", "R": "running, state R", "S": "sleeping, state S",
}  # fmt: skip


def answer(memory: int) -> None:
    """On a rank: from now on the signal has its stacks written to a file descriptor; by what it forks, too.

    So does one that ends it, such as SIGSEGV, unless somebody has asked for that elsewhere.
    """
    faulthandler.register(SIGNAL, file=memory, all_threads=True, chain=False)
    if not faulthandler.is_enabled():
        faulthandler.enable(memory)


def hears(pid: int) -> bool:
    """Whether a process has a handler for the signal, which would end it otherwise."""
    with suppress(OSError):
        found = re.search(r"^SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return found is not None and bool(int(found[1], 16) >> (SIGNAL - 1) & 1)
    return False


def stacks_of(rank: int, pid: int, memory: int) -> str:
    """What a rank does, and the processes that it has forked, in Python's words; what is known, where one is silent."""
    told = []
    for member in family(pid):
        who = f"rank {rank}, process {pid}" if member == pid else f"process {member}, started by rank {rank}"
        if member != pid and not hears(member):
            continue
        told.append(f"{who} on {socket.gethostname()}: {_state(member)}\n{_asked(member, memory)}")
    return "\n".join(told)


def _state(pid: int) -> str:
    state = state_of(pid)
    place = ""
    with suppress(OSError):
        place = Path(f"/proc/{pid}/wchan").read_text().strip("0\n ")
    return STATES.get(state, f"state {state}") + (f" in {place}" if place and state in "SD" else "")


def _asked(pid: int, memory: int) -> str:
    if state_of(pid) in "TtZ" or not hears(pid):
        return "it cannot answer\n"
    before = size = os.fstat(memory).st_size
    now = since = time.monotonic()
    deadline = now + ANSWER_SECONDS
    with suppress(ProcessLookupError):
        os.kill(pid, SIGNAL)
    while now < deadline and (size == before or now - since < QUIET_SECONDS):
        time.sleep(0.01)
        now, grown = time.monotonic(), os.fstat(memory).st_size
        size, since = grown, now if grown != size else since
    return os.pread(memory, size - before, before).decode(errors="replace") or "it does not answer\n"


def _native(pid: int) -> str:
    program = shutil.which("py-spy")
    if program is None or state_of(pid) in "TtZ ":
        return ""
    try:
        done = subprocess.run(
            [program, "dump", "--native", "--pid", str(pid)], capture_output=True, text=True, timeout=NATIVE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{error}\n"
    return done.stdout or done.stderr


def folder(run: Run, generation: int) -> Path:
    return flight.folder(run, generation, "stacks")


def asked(pids: Mapping[int, int], memories: Mapping[int, int]) -> dict[int, str]:
    """The stacks of a host's ranks, given by rank with the memory of each; of as many as there is time for."""
    deadline, told = time.monotonic() + ALL_SECONDS, {}
    for rank, pid in pids.items():
        if time.monotonic() < deadline:
            told[rank] = stacks_of(rank, pid, memories[rank])
    for rank in told:
        if time.monotonic() < deadline and (native := _native(pids[rank])):
            told[rank] += f"\nrank {rank}, process {pids[rank]}, native frames by py-spy\n{native}"
    return told


def write(run: Run, generation: int, told: Mapping[int, str]) -> None:
    """Put them into the run's folder."""
    with suppress(OSError, BadFile):  # a full disk: there is the flight record, perhaps
        make_folder(run.path, folder(run, generation))
        for rank, text in told.items():
            write_whole(folder(run, generation) / f"rank-{rank:05d}.txt", redact(text), within=run.path)


def keep(run: Run, generation: int, rank: int, memory: int) -> None:
    """What a rank that has ended by a signal wrote at that moment, if it did."""
    path = folder(run, generation) / f"rank-{rank:05d}.txt"
    text = os.pread(memory, os.fstat(memory).st_size, 0).decode(errors="replace")
    if (begins := text.rfind(FATAL)) >= 0:
        with suppress(OSError, BadFile):
            make_folder(run.path, path.parent)
            write_whole(path, redact(f"rank {rank}, as it ended\n{text[begins:]}"), within=run.path)


def unanswered(run: Run) -> str:
    """Ask for them; why there is no answer, if there is none."""
    try:
        ask(run)
    except CannotHere as reason:
        return str(reason)
    return ""


def ask(run: Run) -> None:
    """Have the supervisor of this host write down the stacks of its ranks, and wait for them; nothing if none runs."""
    live = re.match(r"process (\d{1,9}) on (\S+)", holder(run.path))
    if live is None:
        return
    here, generation = socket.gethostname(), run.generation()
    flights = flight.read(run, generation).values()
    supervisors = {each.supervisor for each in flights if each.host == here} | (
        {int(live[1])} if live[2] == here else set()
    )
    began = time.time()
    supervisors = {pid for pid in supervisors if belonging.ask(pid, SIGNAL, lambda each: _runs(each, run))}
    if not supervisors:
        raise CannotHere(
            f"{run.path} is run by {live[0]}, and no rank of it runs here, by what the system says, or it is another "
            "user's. Ask for stacks on that host, as that user."
        )
    deadline = time.monotonic() + ASKED_SECONDS
    while not _written(run, generation, began):
        if time.monotonic() > deadline:
            named = ", ".join(map(str, supervisors))
            raise CannotHere(f"process {named} did not write the stacks of {run.path}. Look whether it is stopped.")
        time.sleep(0.05)


def _runs(pid: int, run: Run) -> bool:
    """Whether a process writes to a run's folder, and has a handler for the signal."""
    return hears(pid) and belonging.writes_in(pid, run.path)


def _written(run: Run, generation: int, since: float) -> bool:
    """Whether the records of this host's ranks are newer than that, and so are their stacks, which come first."""
    here = [each for each in flight.read(run, generation).values() if each.host == socket.gethostname()]
    paths = [folder(run, generation) / f"rank-{each.rank:05d}.txt" for each in here]
    fresh = all(path.exists() and path.stat().st_mtime >= since for path in paths)
    return bool(here) and fresh and all(each.saved >= since * 1e9 for each in here)
