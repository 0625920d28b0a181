"""The ground that a job stands on: what each host has, and what is wrong or different among them."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from phalanx import __version__, user_code
from phalanx.launch.rounds import advice
from phalanx.words import in_bytes

OFF_SECONDS, FAR_OFF_SECONDS = 5.0, 60.0
"""Between clocks: what is told, and what is refused: files and stores would take each other's times for wrong."""
LEAST_MEMORY, LEAST_DISK, LEAST_SHARED = 1 << 30, 1 << 30, 256 << 20
"""Free bytes below which a host is pointed out."""
QUERY = "name,ecc.errors.uncorrected.volatile.total,clocks_throttle_reasons.hw_slowdown"


@dataclass(frozen=True)
class Flaw:
    """What is wrong with a host."""

    text: str
    fatal: bool = False
    """It cannot be trained on, or not with the others."""


@dataclass(frozen=True)
class Ground:
    """One host's, in a moment."""

    host: str
    versions: dict[str, str]
    clock: float
    memory: int
    """Bytes that are free."""
    disk: int
    """Likewise, where the run's folder is."""
    shared: int
    """Likewise of shared memory, through which workers hand over batches."""
    gpus: list[str] = field(default_factory=list)
    ill: list[str] = field(default_factory=list)
    """What a GPU says of itself that is bad."""

    @classmethod
    def here(cls, folder: Path, host: str = "", gpus: bool = False) -> Ground:
        """``gpus``: they are looked at too, which takes a moment."""
        names, ill = _gpus() if gpus else ([], [])
        shared = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else LEAST_SHARED
        return cls(
            host or socket.gethostname(), versions(), time.time(), _free_memory(), shutil.disk_usage(folder).free,
            shared, names, ill,
        )  # fmt: skip

    def to_words(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_words(cls, words: str) -> Ground:
        return cls(**json.loads(words))

    def __str__(self) -> str:
        free = {"memory": self.memory, "disk": self.disk, "shared memory": self.shared}
        has = "free " + ", ".join(f"{what} {in_bytes(size)}" for what, size in free.items())
        gpus = f"; {len(self.gpus)} x {self.gpus[0]}" if self.gpus else ""
        return f"{self.host}: torch {self.versions['torch']}, Python {self.versions['Python']}; {has}{gpus}"


def versions(code: str = "") -> dict[str, str]:
    """What all hosts must have alike; ``code``: a hash of what else they run than Phalanx."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]), "torch": torch.__version__, "Phalanx": __version__,
        "NCCL": nccl, "code": code or user_code.own_hash(),
    }  # fmt: skip


def flaws(grounds: Sequence[Ground]) -> list[Flaw]:
    """Of hosts whose grounds were taken at one moment: the first is what others are held against."""
    return [found for ground in grounds for found in _alone(ground)] + list(_compared(grounds))


def _alone(ground: Ground) -> Iterator[Flaw]:
    host = ground.host
    if ground.memory < LEAST_MEMORY:
        yield Flaw(f"host {host} has {in_bytes(ground.memory)} of memory left. End what holds it.")
    if ground.disk < LEAST_DISK:
        yield Flaw(f"host {host} has {in_bytes(ground.disk)} left where the run's folder is. Make room.")
    if ground.shared < LEAST_SHARED:
        yield Flaw(
            f"host {host} has {in_bytes(ground.shared)} of shared memory left: workers that read data may fail. Give a "
            "container more (docker: --shm-size=8g; Kubernetes: an emptyDir of medium Memory at /dev/shm)."
        )
    for words in ground.ill:
        yield Flaw(f"host {host}: {words}", fatal=True)


def _compared(grounds: Sequence[Ground]) -> Iterator[Flaw]:
    first, *others = grounds
    for other in others:
        for name, known in first.versions.items():
            if (theirs := other.versions.get(name)) != known:
                yield Flaw(f"host {other.host} has {name} {theirs} and host {first.host} {known}. {advice(name)}", True)
        off = other.clock - first.clock
        if abs(off) > OFF_SECONDS:
            by = f"{abs(off):.0f} s" if abs(off) < 3600 else f"{abs(off) / 3600:.1f} hours"
            yield Flaw(
                f"the clock of host {other.host} is {by} {'ahead of' if off > 0 else 'behind'} that of host "
                f"{first.host}. Set it (chronyc makestep, timedatectl set-ntp true).",
                fatal=abs(off) > FAR_OFF_SECONDS,
            )


def _free_memory() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return LEAST_MEMORY


def _gpus() -> tuple[list[str], list[str]]:
    """Their names, and what is bad, as nvidia-smi has it."""
    if shutil.which("nvidia-smi") is None:
        return [], []
    words = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(words, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return [], ["nvidia-smi does not answer. See dmesg for Xid errors, and reset or drain the GPUs."]
    names, ill = [], []
    for number, line in enumerate(told.stdout.strip().splitlines()):
        name, errors, slowed = (part.strip() for part in (*line.split(","), "", "")[:3])
        names.append(name)
        if errors.isdecimal() and int(errors):
            ill.append(f"GPU {number} has {errors} uncorrected memory errors. Reset it, or leave it out.")
        if slowed == "Active":
            ill.append(f"GPU {number} is slowed down by its hardware. See to its power and cooling, or leave it out.")
    return names, ill
