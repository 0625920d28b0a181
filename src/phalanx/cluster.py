"""The Cluster: what a job runs on: this machine's devices, or what `phalanx probe` has measured; it knows no task."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from phalanx.errors import CannotHere, WrongUse
from phalanx.toml import from_toml, to_toml
from phalanx.words import many

LEAST_RANKS, RANKS_A_CORE = 64, 16
"""Ranks without a GPU that any machine may be asked for, and those that each core allows: more would only wait."""


def devices(kind: str, ranks: int) -> str:
    """``CPU``, ``GPU``, ``GPUs``: what so many ranks compute on."""
    return "CPU" if kind == "cpu" else "GPUs" if ranks > 1 else "GPU"


@dataclass(frozen=True)
class MeasuredLink:
    """Between two ranks, as it was measured: the slowest of its kind."""

    latency: float
    """Seconds that a byte takes."""
    rate: float
    """Bytes a second, one way."""
    both: float
    """Bytes a second each way, both ways at once."""


@dataclass(frozen=True)
class Cluster:
    """Nodes that are alike, each with so many devices of one kind."""

    device: str
    """``cpu`` or ``cuda``."""
    per_node: int
    nodes: int = 1
    memory_bytes: int = 0
    """Memory of one device; on CPU, its share of the host's."""
    flops: float = 0.0
    """Floating point operations a second of one device, measured with matrices; 0: not measured."""
    codecs: Mapping[str, float] = field(default_factory=dict)
    """By method: bytes of float32 a second that a device encodes and decodes."""
    within: MeasuredLink | None = None
    """Between ranks of one host."""
    between: MeasuredLink | None = None
    """Between ranks of different hosts."""

    def __str__(self) -> str:
        return f"{self.device}x{self.per_node}*{self.nodes}"

    def describe(self) -> str:
        """For people: ``2 ranks on this machine's CPU``, ``8 ranks on GPUs, 4 on each of 2 hosts``."""
        kind = devices(self.device, self.world)
        if self.nodes > 1:
            return f"{many(self.world, 'rank')} on {kind}, {self.per_node} on each of {self.nodes} hosts"
        return f"{many(self.world, 'rank')} on this machine's {kind}"

    @property
    def world(self) -> int:
        return self.per_node * self.nodes

    @property
    def backend(self) -> str:
        """The communication library for these devices."""
        return "nccl" if self.device == "cuda" else "gloo"

    @classmethod
    def here(cls, ranks: int, device: str | None = None) -> Cluster:
        """This machine with ``ranks`` devices: its GPUs if it has any, unless a device is asked for.

        Counting GPUs this way does not initialise CUDA, so a process may still be forked afterwards.
        """
        gpus = torch.cuda.device_count()
        device = device or ("cuda" if gpus else "cpu")
        if device not in ("cpu", "cuda"):
            raise WrongUse(f"device {device!r} is not known. Use cpu or cuda.")
        if device == "cuda" and ranks > gpus:
            raise CannotHere(
                f"{ranks} ranks were asked for and this machine has {gpus} GPUs. "
                + (f"Ask for {gpus}, or add --device cpu." if gpus else "Use --device cpu.")
            )
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls(device, ranks, memory_bytes=host // ranks if device == "cpu" else 0)

    @classmethod
    def read(cls, path: Path) -> Cluster:
        """What `to_toml` wrote."""
        try:
            tables = from_toml(path.read_text(encoding="utf-8"))
            within, between = (
                MeasuredLink(**tables[name]) if name in tables else None for name in ("within", "between")
            )
            return cls(**tables["cluster"], codecs=tables.get("codecs", {}), within=within, between=between)
        except FileNotFoundError:
            raise WrongUse(f"{path} is not there. Write it with phalanx probe --out {path}.") from None
        except (ValueError, KeyError, TypeError) as error:
            raise WrongUse(f"{path} describes no cluster: {error}. Write it with phalanx probe --out {path}.") from None

    def to_toml(self) -> str:
        """A file that `read` reads."""
        own = {name: getattr(self, name) for name in ("device", "per_node", "nodes", "memory_bytes", "flops")}
        links = {name: asdict(link) for name in ("within", "between") if (link := getattr(self, name)) is not None}
        return to_toml({"cluster": own, "codecs": self.codecs, **links})

    def check_room(self) -> None:
        """Refuse more ranks than this machine could ever run."""
        most = max(LEAST_RANKS, RANKS_A_CORE * cores())
        if self.device == "cpu" and self.per_node > most:
            raise CannotHere(
                f"{self.per_node} ranks were asked for and this machine has {cores()} cores, enough for {most} ranks. "
                f"Ask for {most} or fewer."
            )


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads(otherwise: int) -> int:
    """As many threads as ``OMP_NUM_THREADS`` asks for at the outermost level (``4,2``: 4), or else so many."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if not asked:
        return otherwise
    if not re.fullmatch("0*[1-9][0-9]{0,4}", asked):
        raise WrongUse(f"OMP_NUM_THREADS={asked} is no number of threads. Set one, or unset it.")
    return int(asked)
