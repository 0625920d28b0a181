"""The environment a launcher gives a rank: who it is, and how it finds the others."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from phalanx.errors import CannotHere
from phalanx.launch import network

TIMEOUT = timedelta(minutes=10)
_stores: list[dist.Store] = []
"""The job's store, and one a rendezvous."""
_open: list[Callable[[timedelta], dist.Store]] = []
"""How a rank of ours opens the job's store."""


def find_others_by(store: Callable[[timedelta], dist.Store]) -> None:
    """In a rank that was forked for it: the job's store, to be opened when it is needed."""
    _open[:] = [store]
    _stores.clear()


@dataclass(frozen=True)
class Environment:
    """One rank's place in the job. The names are those that torchrun sets and everything reads."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    @classmethod
    def detect(cls) -> Environment:
        """From torchrun's variables, which our own launchers set too; alone if there are none."""
        if dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size(), _number("LOCAL_RANK", 0))
        if not os.environ.get("RANK"):
            return cls()
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if not os.environ.get(name)]
        if missing:
            raise CannotHere(
                f"RANK is set but {', '.join(missing)} is not. Start with torchrun, or unset RANK to run alone."
            )
        rank, world, _ = _number("RANK"), _number("WORLD_SIZE"), _number("MASTER_PORT")
        if rank >= world:
            raise CannotHere(f"RANK={rank} is not below WORLD_SIZE={world}. Start with torchrun, which sets both.")
        return cls(rank, world, _number("LOCAL_RANK", rank))

    @property
    def hosts(self) -> list[int]:
        """On which host each rank is."""
        if "PHALANX_HOSTS" in os.environ and self.world > 1:  # how many ranks each host has, by our own launcher
            return [host for host, n in enumerate(os.environ["PHALANX_HOSTS"].split(",")) for _ in range(int(n))]
        local = _number("LOCAL_WORLD_SIZE", self.world) or 1
        return [rank // local for rank in range(self.world)]

    def join(self, device: torch.device, timeout: timedelta = TIMEOUT) -> bool:
        """Meet the other ranks. True if this call made the process group, which its caller then takes apart."""
        if self.world == 1 or dist.is_initialized():
            return False
        cuda = device.type == "cuda"
        store = self._store(timeout)
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            os.environ |= network.variables(self._interface(store))
        dist.init_process_group(
            "nccl" if cuda else "gloo", store=store, rank=self.rank, world_size=self.world,
            timeout=timeout, device_id=device if cuda else None,
        )  # fmt: skip
        return True

    def _interface(self, store: dist.Store) -> str:
        """The interface that reaches the store, by which other hosts are reached too; "" where it cannot be told.

        On the store's own host its name may mean loopback. What the next host knows it by is this host's, too.
        """
        try:
            way = network.way_to(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), as_named=True)
        except OSError:
            way = network.Way(socket.AF_INET, "", "", "")
        hosts = self.hosts
        if self.local_rank == 0:
            store.set(f"store seen from host {hosts[self.rank]}", way.to)
        if hosts[-1] == 0 or not network.is_loopback(way.to):
            return way.interface
        known = store.get("store seen from host 1").decode()
        return way.interface if network.is_loopback(known) else network.interface_of(known)

    def leave(self) -> None:
        """Part from the other ranks.

        gloo's threads drop their last tensors a moment after a collective is over, and need Python for that: a process
        that ended in that moment was aborted (5 runs in 100). So they are given one.
        """
        dist.destroy_process_group()
        time.sleep(0.1)

    def _store(self, timeout: timedelta) -> dist.Store:
        """Where ranks leave their addresses; each time they meet under a new name, or they would find old ones."""
        if not _stores:
            theirs = None if _open else next(rendezvous("env://", self.rank, self.world, timeout=timeout))[0]
            _stores.append(theirs or _open[0](timeout))
        _stores.append(dist.PrefixStore(f"rendezvous {len(_stores)}", _stores[0]))
        return _stores[-1]

    def device(self, kind: str | None = None) -> torch.device:
        """This rank's device: its GPU if the machine has any, unless a kind is asked for."""
        kind = kind or ("cuda" if torch.cuda.is_available() else "cpu")
        if kind != "cuda":
            return torch.device(kind)
        if self.local_rank >= torch.cuda.device_count():
            raise CannotHere(
                f"rank {self.rank} is number {self.local_rank} on its host, "
                f"which has {torch.cuda.device_count()} GPUs. Start fewer ranks there, or ask for device cpu."
            )
        device = torch.device("cuda", self.local_rank)
        torch.cuda.set_device(device)
        return device


def _number(name: str, otherwise: int = 0) -> int:
    """A variable of the launcher's; empty is as good as not set."""
    text = os.environ.get(name) or str(otherwise)
    if not re.fullmatch("[0-9]{1,9}", text):
        raise CannotHere(f"{name}={text} is no number. Start with torchrun, which sets it, or unset it.")
    return int(text)
