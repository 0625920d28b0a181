"""A place to run: what ``--on`` names beside this machine. One small interface, a file for each that there is."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from phalanx.errors import CannotHere, WrongUse, closest
from phalanx.files import write_whole
from phalanx.folder_files import BadFile, another_user, read_object
from phalanx.redact import redact_words
from phalanx.run import Run
from phalanx.verdict import Verdict
from phalanx.words import digits, printable

PLACES = {"slurm": "Slurm", "kubernetes": "Kubernetes", "ray": "RayCluster", "hosts": "Hosts"}
"""By the word of ``--on``: the class, in the file of that name."""
OTHER_NAMES = {"k8s": "kubernetes", "ssh": "hosts", "host": "hosts", "sbatch": "slurm"}
"""That others have for them."""
MOST_BYTES = 1 << 16
"""Of what a run's folder says of its place."""
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
        for word, hidden in zip(self.words, redact_words(self.words), strict=True):
            if word != hidden:
                raise WrongUse(
                    f"{hidden.partition('=')[0]} has a secret, which would be written into the job. Give it "
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
    job: ClassVar[str]
    """The form of a job's name there, as a regular expression."""
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

    @classmethod
    def noted(cls, options: Mapping[str, str], rest: str) -> Self:
        """The same of what a run's folder says, which asks for nothing outside of it."""
        return cls.parse(options, rest)

    def again(self, run: Run) -> str:
        """The command by which a run goes on there."""
        return f"phalanx train --resume --run {run.in_shell} --on {shlex.quote(self.text)}"

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
    if on is None or on.partition(":")[0] == "local":
        return None
    word, _, rest = on.partition(":")
    if word not in PLACES:
        alike = closest(OTHER_NAMES.get(word.lower(), word.lower()), ["local:N", *PLACES])
        raise WrongUse(f"--on {on}: {word!r} is not a place that is known; {alike}")
    return _kind(word).parse(*_parts(rest))


def _kind(word: str) -> type[Place]:
    found: type[Place] = getattr(importlib.import_module(f"phalanx.launch.{word}"), PLACES[word])
    return found


def _parts(rest: str) -> tuple[dict[str, str], str]:
    """Options by name, and what is none of them."""
    options, unnamed = {}, []
    for part in re.split(r",(?=[a-z][a-z-]*(?:=|,|$))", rest) if rest else ():
        name, equals, value = part.partition("=")
        if equals:
            options[name] = value
        else:
            unnamed.append(part)
    return options, ",".join(unnamed)


def count(options: Mapping[str, str], name: str, otherwise: int, least: int = 1) -> int:
    """A number among a place's options."""
    number = digits(options[name]) if name in options else otherwise
    if number is None or number < least:
        raise WrongUse(f"{name}={options[name]} is no number of {least} or more. Write it like {name}={least + 1}.")
    return number


# What a run's folder says of where it was submitted.


def note(run: Run, on: str, job: str) -> None:
    """Say where a run was submitted, and what its job is called there."""
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
                f"cancel {run.in_shell}, or follow it with phalanx logs {run.in_shell} --follow."
            )


def noted(run: Run) -> tuple[Place, str] | None:
    """The place that a run was submitted to, and its name there; None: it was started here.

    Whoever wrote the folder may have written anything there. A job's name has the form that the place gives to names,
    and what is said of the place is read without asking for anything outside of the folder.
    """
    try:
        found = read_object(run.path, _file(run), MOST_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, BadFile) as error:
        said = error.what if isinstance(error, BadFile) else f"cannot be read: {error.strerror}"
        raise CannotHere(f"{_file(run)} {said}. Remove it if the run was not submitted anywhere.") from None
    on, job = found.get("on"), found.get("job")
    if not isinstance(on, str) or not isinstance(job, str) or printable(on, one_line=True) != on:
        raise _no_place(run, "does not say where the run was submitted")
    word, _, rest = on.partition(":")
    if word not in PLACES:
        raise _no_place(run, "names no place that is known")
    kind = _kind(word)
    if not re.fullmatch(kind.job, job):
        raise _no_place(run, f"names no job as {kind.word} names them")
    try:
        return kind.noted(*_parts(rest)), job
    except WrongUse as error:
        raise _no_place(run, f"says of the place what cannot be ({error})") from None


def _no_place(run: Run, what: str) -> CannotHere:
    return CannotHere(f"{_file(run)} {what}. Remove it if the run was not submitted anywhere.")


def check_own(run: Run, advice: str) -> None:
    """Refuse to act on what a folder says that another user wrote: it may name any job of whoever acts."""
    if whose := said_by(run):
        raise CannotHere(
            f"{_file(run)} belongs to {whose}: what it says of jobs is not acted on. Ask them, or see that the "
            f"job is this run's and end it yourself: {advice}"
        )


def said_by(run: Run) -> str:
    """Which other user wrote where a run was submitted; "": nobody, or who asks."""
    return another_user(_file(run))


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
