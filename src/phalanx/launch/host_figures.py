"""What a host does beside its ranks' steps: processors, memory, disks, network and GPUs, written now and then.

By the supervisor, one file a host, in the run's folder: runs/<name>/events/host-00000.jsonl, by its first rank.
Figures of disks and interfaces are bytes since the line before, ``seconds`` ago.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from phalanx.folder_files import BadFile, appending, make_folder, overwriting, read_bytes
from phalanx.run import Run

MOST_BYTES = 4 << 20
"""Of a host's file: when it has more, the older half is dropped."""
PAUSE_SECONDS = 5.0
INTERFACES = 8
"""So many interfaces are told, those with most traffic."""
SECTOR = 512
SMI = ("index", "clocks.sm", "power.draw", "temperature.gpu", "clocks_throttle_reasons.active")
THROTTLED = {
    0x4: "power cap", 0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat, by hardware", 0x80: "power brake",
}  # fmt: skip
"""Reasons of NVIDIA's driver for a slower clock than could be; idle and asked for are none."""


def figures_path(run: Run, first: int) -> Path:
    """Where a host writes, by its first rank."""
    return run.path / "events" / f"host-{first:05d}.jsonl"


class HostFigures:
    """Looks at this host; what counts up is told as what was added since the last look."""

    def __init__(self) -> None:
        self._smi = shutil.which("nvidia-smi")
        self._asked: subprocess.Popen[str] | None = None
        self._when = time.monotonic()
        self._processors = processors()
        self._bytes = {**disks(), **interfaces()}

    def look(self) -> dict[str, float | str]:
        """Flat numbers by name."""
        now, busy, counts = time.monotonic(), processors(), {**disks(), **interfaces()}
        found: dict[str, float | str] = {"seconds": round(now - self._when, 3)}
        added = [new - old for new, old in zip(busy, self._processors, strict=True)]
        if added[1] > 0:
            found["cpu"] = round(100 * added[0] / added[1], 1)
        found |= memory()
        found |= {name: size - self._bytes[name] for name, size in counts.items() if name in self._bytes}
        self._when, self._processors, self._bytes = now, busy, counts
        return found | self._gpus()

    def _gpus(self) -> dict[str, float | str]:
        """What was asked for at the last look: a driver may take seconds, and nobody waits for it."""
        found: dict[str, float | str] = {}
        if self._asked is not None and self._asked.poll() is not None:
            found, self._asked = gpus(self._asked.communicate()[0]), None
        if self._smi is not None and self._asked is None:
            command = [self._smi, f"--query-gpu={','.join(SMI)}", "--format=csv,noheader,nounits"]
            try:
                self._asked = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace"
                )
            except OSError:
                self._smi = None
        return found

    def close(self) -> None:
        """Nothing that was asked for is left running."""
        if self._asked is not None:
            self._asked.kill()
            self._asked.communicate()
            self._asked = None


class HostLog:
    """A host's figures in the run's folder."""

    def __init__(self, run: Run, first: int, ranks: int) -> None:
        """``first``: the number of its first rank."""
        self._folder, self._path, self._figures = run.path, figures_path(run, first), HostFigures()
        self._facts = {"host": socket.gethostname(), "first": first, "ranks": ranks, "cores": os.cpu_count() or 1}
        self._last = time.monotonic()

    def write(self, least: float = PAUSE_SECONDS) -> None:
        """A line, unless the last was written less than so many seconds ago; a full disk loses it."""
        if time.monotonic() - self._last < least:
            return
        self._last = time.monotonic()
        line = json.dumps({"kind": "host", "time": round(time.time(), 3), **self._facts, **self._figures.look()})
        with suppress(OSError, BadFile):
            make_folder(self._folder, self._path.parent)
            with appending(self._folder, self._path) as file:
                file.write(f"{line}\n".encode())
                size = file.tell()
            if size > MOST_BYTES:
                self._drop_half()

    def close(self) -> None:
        self._figures.close()

    def _drop_half(self) -> None:
        lines = read_bytes(self._folder, self._path, 2 * MOST_BYTES).splitlines(keepends=True)
        unfinished = self._path.with_suffix(".unfinished")
        with overwriting(self._folder, unfinished) as file:
            file.write(b"".join(lines[len(lines) // 2 :]))
        unfinished.replace(self._path)


def processors() -> tuple[int, int]:
    """Ticks since the host began: in which its processors were busy, and all."""
    with suppress(OSError, ValueError, IndexError):
        ticks = [int(word) for word in _read("/proc/stat").splitlines()[0].split()[1:9]]
        return sum(ticks) - ticks[3] - ticks[4], sum(ticks)  # without those that idled or waited for disks
    return 0, 0


def memory() -> dict[str, float | str]:
    """Bytes that are used, and those there are."""
    with suppress(OSError, ValueError, KeyError):
        found = dict(re.findall(r"^(\w+): +(\d+) kB$", _read("/proc/meminfo"), re.MULTILINE))
        total = int(found["MemTotal"])
        return {"memory_used": 1024 * (total - int(found["MemAvailable"])), "memory_total": 1024 * total}
    return {}


def disks() -> dict[str, int]:
    """Bytes that all disks have read and written; what is made of other disks is not counted again."""
    read = written = 0
    with suppress(OSError, ValueError, IndexError):
        for line in _read("/proc/diskstats").splitlines():
            words = line.split()
            if Path("/sys/block", words[2]).exists() and not re.match(r"loop|ram|dm-|md|zram", words[2]):
                read, written = read + int(words[5]), written + int(words[9])
    return {"disk_read": SECTOR * read, "disk_written": SECTOR * written}


def interfaces() -> dict[str, int]:
    """Bytes in and out by interface, of those with most."""
    found: list[tuple[int, str, int, int]] = []
    with suppress(OSError, ValueError, IndexError):
        for line in _read("/proc/net/dev").splitlines()[2:]:
            name, _, rest = line.partition(":")
            came, went = int(rest.split()[0]), int(rest.split()[8])
            if name.strip() != "lo" and came + went:
                found.append((came + went, re.sub(r"\W", "_", name.strip()), came, went))
    busiest = sorted(found, reverse=True)[:INTERFACES]
    return {
        f"net_{way}_{name}": size for _, name, *both in busiest for way, size in zip(("in", "out"), both, strict=True)
    }


def gpus(said: str) -> dict[str, float | str]:
    """What nvidia-smi says of each: MHz, W, degrees, and why it is slower than it could be."""
    found: dict[str, float | str] = {}
    for line in said.splitlines():
        with suppress(ValueError):
            index, clock, power, heat, reasons = (word.strip() for word in line.split(","))
            own = {"clock": clock, "power": power, "temperature": heat}
            for what, word in own.items():
                with suppress(ValueError):  # [N/A]
                    found[f"gpu{index}_{what}"] = float(word)
            bits = int(reasons, 16)
            if why := [name for bit, name in THROTTLED.items() if bits & bit]:
                found[f"gpu{index}_throttled"] = ", ".join(why)
    return found


def _read(path: str) -> str:
    return Path(path).read_text()
