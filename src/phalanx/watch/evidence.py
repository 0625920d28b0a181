"""What a run's folder has to say of its newest generation: flight records, stacks, what failed, events."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx import flight, user_code
from phalanx.event_fields import Check, are_objects, is_flag, is_index, is_number, is_text
from phalanx.flight import Flight
from phalanx.folder_files import BadFile, left_out, names, note, parsed_object, read_bytes, read_text
from phalanx.run import Run, counted, holder
from phalanx.words import in_bytes

COLLECTIVES = ("distributed_c10d.py", "functional_collectives.py")
"""Files of torch's whose functions are collectives."""
MOST_TEXT = 1 << 22
"""Bytes of one rank's stacks, or traceback, or of one host's account of what failed."""
MOST_TEXTS = 1 << 29
"""Bytes of all stacks of a generation."""
MOST_ACCOUNTS = 1 << 26
"""Bytes of all accounts of what failed."""
MOST_BYTES, MOST_EVENTS = 1 << 29, 1 << 20
"""Of the first rank's events, the newest of which are looked at."""
KNOWN = (
    "start", "step", "round", "left out", "rollback", "bad", "corrupted", "replay", "dead gradients", "pause",
    "failure", "stopped", "end", "checkpoint", "evaluation",
)  # fmt: skip
"""Kinds of events that something is concluded from."""
_FRAME = re.compile(r'^  File "(?P<file>[^"\n\0]+)", line (?P<line>\d{1,9}),? in (?P<name>.+)$', re.MULTILINE)
_ACCOUNT = {"host": is_text, "generation": is_index, "steps": is_index, "time": is_number, "failures": are_objects}
_FAILURE = {
    "rank": is_index, "reason": is_text, "trace": is_text, "file": is_text, "final": is_flag, "secondary": is_flag,
    "timed_out": is_flag, "stuck": is_flag,
}  # fmt: skip
"""What an account of a host has, and each of the failures in it."""


@dataclass(frozen=True)
class Frame:
    """A line of a stack."""

    file: str
    line: int
    name: str

    @property
    def is_users(self) -> bool:
        """Whether it is the user's; Python's own may lie elsewhere than this process's do."""
        return user_code.is_users_line(self.file) and not re.search(r"/lib/python3\.\d+/", self.file)

    @property
    def place(self) -> str:
        """File and line; of what is installed, without where."""
        path = Path(self.file)
        if "site-packages" in path.parts:
            return f"{self.file.rpartition('site-packages/')[2]}:{self.line}"
        if path.is_relative_to(user_code.OWN):
            return f"{path.relative_to(user_code.OWN.parent)}:{self.line}"
        return user_code.place(self.file, self.line)


@dataclass(frozen=True)
class RankStacks:
    """What a rank said when it was asked what it does."""

    text: str

    @property
    def state(self) -> str:
        """In the system's words: ``sleeping, state S``."""
        found = re.match(r"rank \d+, process \d+ on \S+: (.+)", self.text)
        return found[1] if found else ""

    @property
    def stopped(self) -> bool:
        return "state T" in self.state or "state t" in self.state

    def frames(self, thread: int) -> list[Frame]:
        """Its main thread's, the innermost first; those of a process that reads data for it, where it has none."""
        own, *others = re.split(r"^process \d+, started by rank.*$", self.text, flags=re.MULTILINE)
        main = _frames(own, thread)
        if not any(frame.is_users for frame in main):
            for other in others:
                reading = _frames(other, thread)
                if any(frame.is_users for frame in reading):
                    return reading
        return main


def _frames(text: str, thread: int) -> list[Frame]:
    """Those of a thread, or of the last in the text: Python names the first one last."""
    threads = re.split(r"^(?:Current thread|Thread) 0x0*([0-9a-f]+)[^\n]*$", text, flags=re.MULTILINE)[1:]
    by_number = dict(zip(threads[::2], threads[1::2], strict=True))
    if not by_number:
        return []
    frames = _as_frames(by_number.get(f"{thread:x}", threads[-1]))
    root = [at for at, frame in enumerate(frames) if user_code.is_root(frame.file, frame.name)]
    return frames[: root[0]] if root else frames


def _as_frames(text: str) -> list[Frame]:
    return [Frame(found["file"], int(found["line"]), found["name"]) for found in _FRAME.finditer(text)]


@dataclass
class Evidence:
    """Of one run."""

    run: Run
    generation: int
    live: str
    """Who runs it at this moment; nothing: nobody."""
    done: bool
    stopped: bool
    """It was asked to stop, and did."""
    flights: dict[int, Flight] = field(default_factory=dict)
    stacks: dict[int, RankStacks] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    """Of this generation, the one that came first before all others; each with its ``host`` and ``steps`` done."""
    earlier: list[dict[str, Any]] = field(default_factory=list)
    """The failures of the last generation before that had any."""
    cut_short: bool = False
    """It was asked to stop, and ranks were ended before they had saved."""
    ended: bool = False
    """Ranks came to the end of the run; it may not be certified all the same."""
    noted: list[dict[str, Any]] = field(default_factory=list)
    """All events of rank 0, read once."""

    @classmethod
    def of(cls, run: Run, live: str | None = None) -> Evidence:
        """``live``: who runs it, if that is known."""
        generation = max([run.generation(), *flight.generations(run)])
        noted = list(deque((e for e in run.events(0, *KNOWN, newest=MOST_BYTES) if "time" in e), MOST_EVENTS))
        if len(noted) == MOST_EVENTS:
            note(f"{run.events_path(0)} has more than {MOST_EVENTS:,} events: of these the last are looked at")
        marks = [event for event in noted if event["kind"] in ("start", "stopped", "end")]
        begun = [event.get("generation", generation) for event in marks if event["kind"] == "start"]
        if begun and begun[-1] < generation:  # it was taken up again, and ranks did not come to their start
            marks.append({"kind": "start"})
        ended = [event["kind"] for event in marks]
        accounts = _accounts(run)
        before = max((each for each in accounts if each < generation), default=generation)
        return cls(
            run, generation, holder(run.path) if live is None else live,
            run.certified_steps() is not None and ended[-1:] != ["start"],
            ended[-1:] == ["stopped"] or flight.was_stopped(run, generation),
            flight.read(run, generation), dict(_stacks(run, generation)),
            _ordered(accounts.get(generation, [])), _ordered(accounts[before]) if before < generation else [],
            cut_short=ended[-1:] == ["start"] and flight.was_stopped(run, generation),
            ended=ended[-1:] == ["end"], noted=noted,
        )  # fmt: skip

    def before(self) -> Evidence | None:
        """Of the last generation that failed before this one, if there was one."""
        if not self.earlier:
            return None
        generation = self.earlier[0]["generation"]
        flights, stacks = flight.read(self.run, generation), dict(_stacks(self.run, generation))
        return Evidence(self.run, generation, "", False, False, flights, stacks, self.earlier, noted=self.noted)

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """What rank 0 noted of these kinds."""
        return [event for event in self.noted if event["kind"] in kinds]

    def ledger(self) -> dict[int, dict[str, Any]]:
        """The steps that led to where the run stands (`Run.ledger`)."""
        return counted(self.noted)

    def host(self, rank: int) -> str:
        if rank in self.flights:
            return self.flights[rank].host
        return next((failure["host"] for failure in self.failures if failure["rank"] == rank), "an unknown host")

    def who(self, rank: int) -> str:
        return f"rank {rank} on {self.host(rank)}"

    def frames(self, rank: int) -> list[Frame]:
        """A rank's stack, the innermost line first, if it was asked for; or where it raised."""
        known, record = self.stacks.get(rank), self.flights.get(rank)
        return known.frames(record.thread if record else 0) if known else self._raised(rank)

    def _raised(self, rank: int) -> list[Frame]:
        """Where the error came from that a rank failed with."""
        for failure in self.failures:
            if failure["rank"] == rank and failure["file"]:
                path = self.run.path / "failures" / Path(failure["file"]).name
                with left_out():
                    text = read_text(self.run.path, path, MOST_TEXT)
                    return _as_frames(text.rpartition("Traceback (most recent call last)")[2])[::-1]
        return []

    def line(self, rank: int) -> Frame | None:
        """Where a rank is: the innermost line of the user's, or else of ours."""
        frames = self.frames(rank)
        users = [frame for frame in frames if frame.is_users]
        ours = [frame for frame in frames if Path(frame.file).is_relative_to(user_code.OWN)]
        return next(iter([*users, *ours, *frames]), None)

    def called(self, rank: int) -> str:
        """The collective of torch's that a rank's own code is in, past our communicators."""
        for frame in self.frames(rank):
            if frame.file.endswith(COLLECTIVES) and not frame.name.startswith("_") and frame.name != "wrapper":
                return f"torch.distributed.{frame.name}"
            if Path(frame.file).is_relative_to(user_code.OWN) and "communication" in frame.file:
                return ""
        return ""


def _accounts(run: Run) -> dict[int, list[dict[str, Any]]]:
    """By generation, what hosts wrote of failures there."""
    found: dict[int, list[dict[str, Any]]] = {}
    folder, size = run.path / "failures", 0
    for name in names(run.path, folder):
        if not re.fullmatch(r"generation-\d{5,10}-from-\d{5,9}\.json", name):
            continue
        with left_out():
            content = read_bytes(run.path, folder / name, MOST_TEXT)
            size += len(content)
            if size > MOST_ACCOUNTS:
                note(f"{folder} has more than {in_bytes(MOST_ACCOUNTS)} of accounts: those from {name} on are left out")
                break
            account = _account(parsed_object(content, folder / name), folder / name)
            if account["failures"]:
                found.setdefault(account["generation"], []).append(account)
    return found


def _account(found: dict[str, Any], path: Path) -> dict[str, Any]:
    """A host's account; `BadFile` where it lacks something."""
    wrong = _wrong(found, _ACCOUNT) or [name for each in found["failures"] for name in _wrong(each, _FAILURE)]
    if wrong:
        raise BadFile(path, f"is no account of what failed: {wrong[0]} is missing, or of another type")
    return found


def _wrong(part: Mapping[str, Any], checks: Mapping[str, Check]) -> list[str]:
    return [name for name, check in checks.items() if not check(part.get(name))]


def _ordered(accounts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The failures of all hosts, causes before what followed from them."""
    found = [
        {**failure, "host": account["host"], "steps": account["steps"], "generation": account["generation"]}
        for account in sorted(accounts, key=lambda account: account["time"])
        for failure in account["failures"]
    ]
    return sorted(found, key=lambda failure: (failure["reason"] == "was stopped", failure["secondary"]))


def _stacks(run: Run, generation: int) -> Iterator[tuple[int, RankStacks]]:
    folder, size = flight.folder(run, generation, "stacks"), 0
    for name in names(run.path, folder):
        if not re.fullmatch(r"rank-\d{5,6}\.txt", name):
            continue
        with left_out():
            text = read_text(run.path, folder / name, MOST_TEXT)
            size += len(text)
            if size > MOST_TEXTS:
                note(f"{folder} has more than {in_bytes(MOST_TEXTS)} of stacks: those from {name} on are left out")
                return
            yield int(name[5:-4]), RankStacks(text)
