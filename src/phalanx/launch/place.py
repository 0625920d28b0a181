"""A place to run: what ``--on`` names beside this machine. One small interface, a file for each that there is."""

from __future__ import annotations

import importlib
import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from phalanx.errors import CannotHere, WrongUse, closest
from phalanx.files import write_whole
from phalanx.redact import redact, redact_field
from phalanx.run import Run
from phalanx.verdict import Verdict
from phalanx.words import digits

PLACES = {"slurm": "Slurm", "kubernetes": "Kubernetes", "ray": "RayCluster", "hosts": "Hosts"}
"""By the word of ``--on``: the class, in the file of that name."""
OTHER_NAMES = {"k8s": "kubernetes", "ssh": "hosts", "host": "hosts", "sbatch": "slurm"}
"""That others have for them."""
QUEUED, RUNNING, ENDED, UNKNOWN = "queued", "running", "ended", "unknown"


@dataclass(frozen=True)
class Status:
    """How a submitted job is doing, by what the place says."""

    state: str
    """One of queued, running, ended, unknown."""
    detail: str = ""
    """The place's own words."""
    code: int | None = None
    """The exit code of one that ended."""


@dataclass(frozen=True)
class Command:
    """What each host of a job runs: this machine's ``phalanx`` with the words that a user gave it."""

    python: str
    words: tuple[str, ...]
    """After the verb, without ``--on`` and ``--run``."""
    folder: Path
    """Where it is run, which relative paths mean."""
    run: Path
    name: str
    grace: float
    """Seconds that ranks have to save in when they are asked to stop."""
    resume: bool = False
    """Whether a run that is in its folder already is to go on."""
    verb: str = "train"

    def __post_init__(self) -> None:
        for word in self.words:
            name, _, value = word.partition("=")
            if redact(word) != word or redact_field(name, value) != value:
                raise WrongUse(
                    f"{redact(word).partition('=')[0]} has a secret, which would be written into the job. Give it "
                    "through the environment or a file that the task reads, or through fsspec's own configuration."
                )

    def value(self, option: str) -> str | None:
        """What the user gave for an option."""
        return self.words[self.words.index(option) + 1] if option in self.words[:-1] else None

    def on(self, ranks: int, run: str | None = None) -> list[str]:
        """Its words for a host with so many ranks."""
        where = ["--run", run or str(self.run), "--on", f"local:{ranks}"]
        again = ["--resume"] if self.verb == "train" else []
        return [self.python, "-m", "phalanx", self.verb, *self.words, *where, *again]


@dataclass(frozen=True, kw_only=True)
class Place(ABC):
    """Hosts that are alike, with so many ranks each."""

    word: ClassVar[str]
    nodes: int = 1
    ranks: int = 1
    gpus: int = 0
    """On each host; 0: its ranks compute on the CPU."""

    @property
    @abstractmethod
    def text(self) -> str:
        """As ``--on`` has it."""

    @property
    def world(self) -> int:
        """Ranks of all hosts together."""
        return self.nodes * self.ranks

    @classmethod
    @abstractmethod
    def parse(cls, options: Mapping[str, str], rest: str) -> Self:
        """From what follows the word: ``name=value`` by name, and what is none of these."""

    def tried(self, word: str) -> str:
        """A word of the user's as it is when it is checked here, where the place makes another of it."""
        return word

    def again(self, run: Run) -> str:
        """The command by which a run goes on there."""
        return f"phalanx train --resume --run {run.path} --on {self.text}"

    @abstractmethod
    def preview(self, command: Command) -> str:
        """What would be submitted or run, in full."""

    @abstractmethod
    def train(self, command: Command, check: Callable[[], object]) -> Verdict:
        """Have it run, and follow it to its end; ``check`` refuses what cannot work, and then nothing is left of it."""

    @abstractmethod
    def status(self, run: Run, job: str) -> Status: ...

    @abstractmethod
    def cancel(self, run: Run, job: str) -> None:
        """Ask it to save and end."""

    @abstractmethod
    def output(self, run: Run, job: str) -> Path:
        """The file that has what it printed."""

    @contextmanager
    def fetching(self, run: Run, job: str, keep_on: bool) -> Iterator[None]:
        """Meanwhile what it prints comes into that file; by default the place sees to that by itself.

        ``keep_on``: for as long as it runs; otherwise what there is, before this is entered.
        """
        yield


def place_of(on: str | None) -> Place | None:
    """What ``--on`` means; None: this machine."""
    if on is None:
        return None
    word, _, rest = on.partition(":")
    if word == "local":
        return None
    if word not in PLACES:
        alike = closest(OTHER_NAMES.get(word.lower(), word.lower()), ["local:N", *PLACES])
        raise WrongUse(f"--on {on}: {word!r} is not a place that is known; {alike}")
    kind = getattr(importlib.import_module(f"phalanx.launch.{word}"), PLACES[word])
    options, unnamed = {}, []
    for part in re.split(r",(?=[a-z][a-z-]*(?:=|,|$))", rest) if rest else ():
        name, equals, value = part.partition("=")
        if equals:
            options[name] = value
        else:
            unnamed.append(part)
    return kind.parse(options, ",".join(unnamed))


def count(options: Mapping[str, str], name: str, otherwise: int, least: int = 1) -> int:
    """A number among a place's options."""
    number = digits(options[name]) if name in options else otherwise
    if number is None or number < least:
        raise WrongUse(f"{name}={options[name]} is no number of {least} or more. Write it like {name}={least + 1}.")
    return number


# What a run's folder says of where it was submitted.


def note(run: Run, on: str, job: str) -> None:
    write_whole(_file(run), json.dumps({"on": on, "job": job, "time": time.time()}) + "\n")


def forget(run: Run) -> None:
    _file(run).unlink(missing_ok=True)


def taken_back(run: Run) -> None:
    """Forget a job that is known to have ended: the run is trained on this machine from here on."""
    with suppress(CannotHere, WrongUse, OSError):  # who would know of it is not asked from here
        before = noted(run)
        if before is not None and before[0].status(run, before[1]).code is not None:
            forget(run)


def check_over(run: Run) -> None:
    """Two jobs would train one run: refuse while one that was submitted before is not over."""
    before = noted(run)
    if before is not None:
        place, job = before
        status = place.status(run, job)
        if status.state in (QUEUED, RUNNING):
            raise WrongUse(
                f"{run.path} is trained by {place.word} job {job}: {status.detail}. End that first, with phalanx "
                f"cancel {run.path}, or follow it with phalanx logs {run.path} --follow."
            )


def noted(run: Run) -> tuple[Place, str] | None:
    """The place that a run was submitted to, and its name there; None: it was started here."""
    try:
        found = json.loads(_file(run).read_text())
        on, job = found["on"], found["job"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        raise CannotHere(f"{_file(run)} cannot be read. Remove it if the run was not submitted anywhere.") from None
    place = place_of(on)
    return None if place is None else (place, str(job))


def _file(run: Run) -> Path:
    return run.path / "place.json"


def words_of(given: Mapping[str, object], left_out: Sequence[str]) -> tuple[str, ...]:
    """Options of ``phalanx train`` as a command line has them, the task first."""
    words: list[str] = []
    for name, value in given.items():
        if name in left_out or value is None or value is False:
            continue
        if name == "task":
            words.insert(0, str(value))
            continue
        option = "--set" if name == "assignments" else f"--{name.replace('_', '-')}"
        if isinstance(value, (list, tuple)):
            words += [word for each in value for word in (option, str(each))]
        else:
            words += [option] if value is True else [option, str(value)]
    return tuple(words)
