"""Is the ground fit to train on? ``phalanx doctor`` asks alone, every launch on several hosts before its first step.

Versions and code are compared when hosts meet (``launch.rendezvous``), and the run's folder is looked at then
(``launch.shared``). Here ranks compare clocks and what is free, and time how fast they reach each other; the doctor has
every device compute something that is known, too.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.checkpoint.slot import new_memory
from phalanx.checkpoint.store import Folder
from phalanx.cluster import Cluster
from phalanx.errors import CannotHere, WrongUse
from phalanx.launch.environment import Environment
from phalanx.launch.ground import Flaw, Ground, flaws, versions
from phalanx.launch.key import Key
from phalanx.launch.rendezvous import Rendezvous
from phalanx.launch.shared import Shared
from phalanx.launch.supervisor import Host, Supervisor
from phalanx.parallel.communication import links
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.traffic import Traffic
from phalanx.run import Run
from phalanx.train.options import Options
from phalanx.train.placing import ranks_of
from phalanx.verdict import Verdict
from phalanx.words import bits, many

MOST_PAIRS = 64
"""Hosts of which any two are timed; of more, each with the next."""
SLOW = 0.5
"""A link of less than so much of the median's rate is pointed out."""
SIZE = 1024
"""Rows and columns of what a device multiplies."""


def check_hosts(environment: Environment, device: torch.device, folder: Path) -> list[str]:
    """Refuse hosts that cannot train together; on rank 0 what else there is to say of them, a line each."""
    hosts = environment.hosts
    if len(set(hosts)) == 1:
        return []
    _, found = _gathered(environment, folder, gpus=False)
    fatal = [flaw.text for flaw in found if flaw.fatal]
    if fatal:
        raise CannotHere(" ".join(fatal))
    told = _slowest(links.ring(device), hosts)
    return [flaw.text for flaw in found] + told if environment.rank == 0 else []


def _gathered(environment: Environment, folder: Path, gpus: bool) -> tuple[list[Ground], list[Flaw]]:
    """Every host's ground, by its first rank, and what is to be said of them; the same on all ranks."""
    world = Communicator(dist.group.WORLD if environment.world > 1 else None, Traffic(), "world")
    if environment.world > 1:
        dist.barrier()  # clocks are compared that were read at about one moment
    own = [Ground.here(folder, gpus=gpus).to_words()] if environment.local_rank == 0 else []
    every = world.all_gather_words(own) if environment.world > 1 else [own]
    grounds = [Ground.from_words(word) for words in every for word in words]
    return grounds, flaws(grounds)


def _slowest(rates: links.Rates, hosts: list[int]) -> list[str]:
    """In words, of links between hosts; of those within one if there are no others."""
    across = {pair: rate for pair, rate in rates.items() if hosts[pair[0]] != hosts[pair[1]]} or rates
    if not across:
        return []
    (source, to), rate = min(across.items(), key=lambda item: item[1])
    median = sorted(across.values())[len(across) // 2]
    kind = "hosts" if len(set(hosts)) > 1 else "ranks"
    told = [f"links between {kind}: {bits(median)} in the middle, slowest rank {source} to rank {to}, {bits(rate)}"]
    if rate < SLOW * median:
        told.append(f"the link from rank {source}, on host {hosts[source] + 1}, to rank {to} is far slower than others")
    return told


# The doctor.


@dataclass(frozen=True)
class Health:
    """What the first rank found of all."""

    lines: list[str]
    fatal: bool


def doctor(given: dict[str, Any]) -> Verdict:
    """Examine this machine with so many ranks, or several hosts that meet, each with this command."""
    met = meet(given, "doctor", _examined)
    return met.unfinished() or _concluded(met)


@dataclass(frozen=True)
class Met:
    """What ranks came to that met to examine the ground."""

    supervisor: Supervisor
    outcome: Any
    seconds: float

    @property
    def result(self) -> Any:
        """What the first rank returned, on the host that leads; else None."""
        return self.outcome.result if self.supervisor.leads else None

    def unfinished(self) -> Verdict | None:
        """Where they did not come to an end."""
        if self.outcome.failures:
            first = self.outcome.failures[0]
            return Verdict(False, f"rank {first.rank}: {first.reason}", next="Mend that, and ask again.", code=3)
        return Verdict(False, "stopped: nothing was concluded", code=130) if self.outcome.interrupted else None


def meet(given: dict[str, Any], name: str, work: Callable[[Path, str, float, Host], Any]) -> Met:
    """Have ``work(folder, device, timeout, host)`` done by so many ranks here, or of several hosts that meet."""
    ranks = ranks_of(given["on"]) if given["on"] else 1
    cluster = Cluster.here(ranks, given["device"])
    cluster.check_room()
    names = ("timeout", "min_nodes", "max_nodes", "meet", "host", "interface")
    options = Options.resolve({name: given[name] for name in names}, {})
    with ExitStack() as undo:
        folder = given["run"]
        if folder is None:
            if options.meet is not None:
                raise WrongUse("several hosts need one folder that all of them see. Give it with --run.")
            folder = undo.enter_context(tempfile.TemporaryDirectory())
        run = Run.folder(folder, name)
        rendezvous = None if options.meet is None else _meeting(options, run, ranks, name)
        shared = None if rendezvous is None else Shared(rendezvous, Folder(run.path), Folder(run.path))
        supervisor = Supervisor(run, ranks, new_memory, 0, 5.0, rendezvous, shared=shared)
        began = time.monotonic()
        try:
            with supervisor.heeding():
                outcome = supervisor.supervise(partial(work, run.path, cluster.device, options.timeout))
        finally:
            if rendezvous is not None:
                rendezvous.close()
    return Met(supervisor, outcome, time.monotonic() - began)


def _meeting(options: Options, run: Run, ranks: int, name: str) -> Rendezvous:
    assert options.meet is not None
    return Rendezvous(
        options.meet, key=Key.of_run(run.path), name=f"{name} {run.path.resolve()}", ranks=ranks,
        min_nodes=max(options.min_nodes, options.max_nodes), max_nodes=options.max_nodes, host=options.host or "",
        patience=options.timeout, interface=options.interface, terms=versions(),
    )  # fmt: skip


def _concluded(met: Met) -> Verdict:
    health = met.result
    if not isinstance(health, Health):
        return Verdict(True, "examined: the first host says what was found")
    fit = "the ground is not fit to train on" if health.fatal else "the ground is fit to train on"
    return Verdict(not health.fatal, f"{fit} ({met.seconds:.1f} s)", health.lines, code=3 if health.fatal else 0)


def _examined(folder: Path, kind: str, timeout: float, host: Host) -> Health:
    """What each rank does."""
    environment = Environment.detect()
    device = environment.device(kind)
    with ExitStack() as undo:
        if environment.join(device, timedelta(seconds=timeout)):
            undo.callback(environment.leave)
        grounds, found = _gathered(environment, folder, gpus=kind == "cuda")
        found += _devices(environment, device)
        lines = [str(ground) for ground in grounds]
        if environment.world > 1:
            hosts = environment.hosts
            first = [hosts.index(number) for number in sorted(set(hosts))]
            timed = first if 1 < len(first) <= MOST_PAIRS else []
            rates = links.pairs(timed, device) if timed else links.ring(device)
            lines += _slowest(rates, hosts)
        lines += [f"{'wrong' if flaw.fatal else 'note'}: {flaw.text}" for flaw in found]
        lines.append(f"{many(environment.world, 'rank')} met, and each computed what it should" if not found else "")
        return Health([line for line in lines if line], any(flaw.fatal for flaw in found))


def _devices(environment: Environment, device: torch.device) -> list[Flaw]:
    """Those that compute something else than they should: whole numbers, whose products are exact on any device."""
    made = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-8, 9, (SIZE, SIZE), generator=made).float() for _ in range(2))
    right = torch.equal((a.to(device) @ b.to(device)).cpu(), a @ b)
    answers = torch.tensor([float(right)], device=device)
    if environment.world > 1:
        every = [torch.empty_like(answers) for _ in range(environment.world)]
        dist.all_gather(every, answers)
        answers = torch.cat(every)
    wrong = [rank for rank, good in enumerate(answers.tolist()) if not good]
    return [Flaw(f"the device of rank {rank} computes wrongly. Take it out of service.", True) for rank in wrong]
