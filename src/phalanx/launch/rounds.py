"""What hosts that meet agree on: a round of so many hosts, and why it is over."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Round:
    """Who is in, and where this round's ranks find their store."""

    generation: int
    """Larger in every round, and never used again as long as one host, or the caller's ``after``, remembers it."""
    node: int
    """This host's place: hosts of the last round keep their order, new ones come after them."""
    hosts: list[str]
    ranks: list[int]
    """How many each host brings."""
    address: str
    port: int
    interface: str = ""
    """Through which this host reaches the others; "" where that cannot be told."""
    listening: socket.socket | None = field(default=None, compare=False, repr=False)
    """On node 0: the socket behind that address, to open a new store with; now the caller's."""

    @property
    def nodes(self) -> int:
        return len(self.hosts)


@dataclass(frozen=True)
class RoundChange:
    """Why a round is over, or should be."""

    why: str
    urgent: bool
    """Ranks are gone: stop the others now. If not: stop at the next good moment."""


def advice(term: str) -> str:
    """What to do where hosts differ in this."""
    if term in ("Python", "torch", "Phalanx", "NCCL"):
        return f"Install the same {term} on all hosts."
    if term == "code":
        return "Give all hosts the same files of the task, and the same source of Phalanx."
    return "Start all hosts of a run with the same settings, and every run with a port of its own."
