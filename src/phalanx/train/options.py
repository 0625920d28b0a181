"""How a job is run and kept, as the command line has it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_type_hints

from phalanx.comm_methods import TOLERANCE
from phalanx.errors import WrongUse
from phalanx.launch.environment import TIMEOUT
from phalanx.launch.network import check_interface
from phalanx.launch.stopping import GRACE
from phalanx.launch.supervisor import FRUITLESS
from phalanx.redact import is_redacted, redact_field
from phalanx.settings import convert
from phalanx.train import evaluated_beside
from phalanx.train.guard import Guard
from phalanx.train.policy import Policy
from phalanx.train.profile.request import ProfileRequest
from phalanx.watch.loggers import chosen as loggers
from phalanx.words import digits

MOST_NODES = 1 << 16
LONGEST_SECONDS = 2_000_000
"""What the system can wait for at once, its clock having 31 bits of milliseconds."""


@dataclass(frozen=True)
class Options:
    """Everything beside what is trained and how it is spread."""

    timeout: float = TIMEOUT.total_seconds()
    save_steps: int = Policy.steps
    save_minutes: float = Policy.minutes
    memory_steps: int = Policy.memory_steps
    keep: int = Policy.keep
    keep_every: int = Policy.keep_every
    checkpoints: str | None = None
    init_from: str | None = None
    restarts: int = FRUITLESS
    grace: float = GRACE
    bad: str = "skip"
    spike: float = 0.0
    loss_tolerance: float = TOLERANCE
    """Percent by which a loss may be higher for what ``comm=auto`` chooses."""
    compare_steps: int = 500
    min_nodes: int = 1
    max_nodes: int = 1
    meet: str | None = None
    """Where supervisors of several hosts meet, ``host:port``."""
    host: str | None = None
    interface: str | None = None
    """Through which other hosts reach this one; by default the one that reaches the rendezvous."""
    allow: str | None = None
    """``changes``: go on with a run although other samples are to come than were planned."""
    unchecked: bool = False
    """The task is not checked before its first step."""
    log: list[str] = field(default_factory=list)
    """Where a run's numbers are written beside its events: csv, tensorboard and others."""
    metrics_port: str | None = None
    """Where Prometheus finds them, ``9090`` or ``0.0.0.0:9090``."""
    log_every: int = 0
    """A line on the screen every so many steps; 0: as many as there is room for."""
    quiet: bool = False
    """Nothing is printed but what is noted, and the verdict."""
    kill: str | None = None
    """A drill: ``1@60`` kills rank 1 after step 60."""
    evaluate_on: str | None = None
    """The device of a process that evaluates checkpoints beside training: cpu, cuda, cuda:1."""
    profile: str | None = None
    """``10:12``: steps 10 to 12 are profiled; see `train.profile.request`."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout <= LONGEST_SECONDS:
            most = f"Give seconds above 0, up to {LONGEST_SECONDS:,}."
            raise WrongUse(f"--timeout {self.timeout:g} is no time to wait. {most}")
        Guard(self.bad, self.spike)
        if min(self.min_nodes, self.max_nodes) < 1 or self.min_nodes > self.max_nodes:
            raise WrongUse(
                f"--min-nodes {self.min_nodes} and --max-nodes {self.max_nodes} cannot be. Ask for 1 <= min <= max."
            )
        if self.max_nodes > MOST_NODES:
            raise WrongUse(f"--max-nodes {self.max_nodes} is more than can be, {MOST_NODES:,}. Ask for fewer.")
        if self.keep < 1:
            raise WrongUse(f"--keep {self.keep} would keep nothing to go on from. Give 1 or more.")
        for name, value in asdict(self).items():
            if isinstance(value, (int, float)) and not 0 <= value < math.inf:
                wrong = "below 0" if value < 0 else "no number to count to"
                least = "0 for never" if name != "loss_tolerance" else "0, which leaves out what changes the loss"
                raise WrongUse(f"--{name.replace('_', '-')} {value} is {wrong}. Give {least}, or more.")
        if (self.checkpoints or "").startswith("memory:"):
            raise WrongUse(f"--checkpoints {self.checkpoints} would be gone with each process. Give a folder or a URL.")
        if self.grace > LONGEST_SECONDS:
            raise WrongUse(f"--grace {self.grace:g} is too long. Give at most {LONGEST_SECONDS:,} seconds.")
        if (max(self.min_nodes, self.max_nodes) > 1) != (self.meet is not None):
            given = f"--min-nodes {self.min_nodes} --max-nodes {self.max_nodes} --meet {self.meet or '(not given)'}"
            raise WrongUse(
                f"{given} do not go together. For several hosts give --max-nodes and --meet on each of them, e.g. "
                "--max-nodes 4 --meet node1:29400. For one host give none of them."
            )
        if self.interface is not None:
            if self.meet is None:
                raise WrongUse(
                    f"--interface {self.interface} has no effect on one host: its ranks speak through loopback. Leave "
                    "it out, or give --meet."
                )
            check_interface(self.interface)
        if self.allow not in (None, "changes"):
            raise WrongUse(f"--allow {self.allow} is nothing that can be allowed. Write --allow changes.")
        if self.quiet and self.log_every:
            raise WrongUse(
                f"--quiet prints no lines, and --log-every {self.log_every} asks for some. Give one of them."
            )
        if self.evaluate_on is not None:
            evaluated_beside.check(self.evaluate_on)
            if self.meet is not None:
                raise WrongUse(
                    "--evaluate-on is a process on one host. With several, run phalanx evaluate RUN --follow on one."
                )
        loggers.check(self.log, self.metrics_port)
        self.drill()
        self.profiled()

    @classmethod
    def resolve(cls, given: Mapping[str, Any], saved: Mapping[str, Any]) -> Options:
        """The command line's words, over those of a ``run.toml``, which has no secret."""
        kinds = get_type_hints(cls)
        values = {name: convert(saved[name], kinds[name], name) for name in kinds if name in saved}
        values |= {name: value for name, value in given.items() if value is not None}
        for name in ("checkpoints", "init_from"):
            if is_redacted(name, values.get(name)):
                option = f"--{name.replace('_', '-')}"
                raise WrongUse(
                    f"the run's settings have {values[name]}, without its secret. Give {option} again, with the secret "
                    "in it, or without where fsspec's own configuration or environment has it."
                )
        return cls(**values)

    def to_repeat(self) -> dict[str, Any]:
        """What a ``run.toml`` should say: what is not as usual, with full paths, and nothing of this start alone."""
        whole = replace(
            self, checkpoints=full_path(self.checkpoints), init_from=full_path(self.init_from),
            host=None, interface=None, allow=None, kill=None, log_every=0, quiet=False, profile=None,
        )  # fmt: skip
        usual = asdict(Options())
        return {n: redact_field(n, v) for n, v in asdict(whole).items() if v != usual[n] or n == "timeout"}

    def drill(self) -> tuple[int, int] | None:
        """Which rank is killed after which step, if any."""
        if self.kill is None:
            return None
        rank, at, step = self.kill.partition("@")
        if not (at and (which := digits(rank)) is not None and (after := digits(step)) is not None):
            raise WrongUse(f"--kill {self.kill} is not a rank and a step. Write it like --kill 1@60.")
        return which, after

    def profiled(self) -> ProfileRequest | None:
        """What is to be profiled, if anything."""
        return None if self.profile is None else ProfileRequest.parse(self.profile)

    def policy(self) -> Policy:
        return Policy(self.save_steps, self.save_minutes, self.memory_steps, self.keep, self.keep_every)


def full_path(place: str | None) -> str | None:
    """A folder by its full path; a URL as it is."""
    return place if place is None or "://" in place else str(Path(place).resolve())
