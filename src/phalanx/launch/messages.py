"""What hosts of a rendezvous say: each kind of message is a dataclass, whose types and bounds are checked on arrival.

On the way a message is the JSON of its kind and its fields. What is not exactly one of these is `Unreadable`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

LONGEST_TEXT = 1 << 16
MOST_ITEMS = 1 << 16
LARGEST_NUMBER = 1 << 53


class Unreadable(ValueError):
    """Not a message of ours; says what is wrong with it, not what it says."""


@dataclass
class Book:
    """What every member knows of the present round."""

    generation: int = 0
    hosts: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    address: str = ""
    port: int = 0
    over: str = ""
    """Why, once the round is over."""
    urgent: bool = False
    wanted: str = ""
    """A host that waits for a place, and could have one."""
    lost: list[str] = field(default_factory=list)
    done: dict[str, str] = field(default_factory=dict)
    """Outcomes, of the hosts whose ranks have all returned."""
    facts: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(len(self.hosts) == len(self.ranks) and len(set(self.hosts)) == len(self.hosts), "hosts")
        _check(all(ranks > 0 for ranks in self.ranks), "ranks")

    @property
    def running(self) -> bool:
        return bool(self.hosts) and not self.over

    @property
    def finished(self) -> str | None:
        """The outcome, once every host of the round has one."""
        if not self.hosts or any(host not in self.done for host in self.hosts):
            return None
        return ", ".join(sorted(set(self.done.values())))

    def end(self, why: str, urgent: bool) -> None:
        """The first reason stays; that it became urgent may come later."""
        self.over = self.over or why
        self.urgent = self.urgent or urgent

    def lose(self, host: str, why: str) -> None:
        if host in self.hosts and host not in self.lost and host not in self.done:
            self.lost.append(host)
            self.end(f"host {host} was lost: {why}", urgent=True)


@dataclass(frozen=True)
class Hello:
    """A host's first words."""

    version: int
    host: str
    token: str
    """Tells a host that comes back from another one of the same name."""
    terms: dict[str, str]
    """What all hosts must agree on."""
    book: Book

    def __post_init__(self) -> None:
        _check(0 < len(self.host) <= 256, "host")


@dataclass(frozen=True)
class Welcome:
    """A host may join the next round; the present one, and who keeps the rendezvous server."""

    host: str
    generation: int


@dataclass(frozen=True)
class Join:
    """A host waits for a round."""

    ranks: int
    after: int
    """A generation that it remembers."""
    address: str
    port: int
    """Where the ranks' store would be, should this host become the first."""
    patience: float
    waited: float

    def __post_init__(self) -> None:
        _check(0 < self.ranks <= 1 << 20, "ranks")
        _check(self.after >= 0, "after")
        _check(0 < self.port < 1 << 16, "port")
        _check(0 < len(self.address) <= 256, "address")


@dataclass(frozen=True)
class Leave:
    why: str


@dataclass(frozen=True)
class Failed:
    generation: int
    why: str


@dataclass(frozen=True)
class Done:
    generation: int
    outcome: str


@dataclass(frozen=True)
class Fact:
    generation: int
    key: str
    text: str


@dataclass(frozen=True)
class News:
    book: Book


@dataclass(frozen=True)
class Evicted:
    why: str


@dataclass(frozen=True)
class Refused:
    kind: str
    why: str


@dataclass(frozen=True)
class Farewell:
    """The rendezvous server closes in peace."""


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life."""


Message = Hello | Welcome | Join | Leave | Failed | Done | Fact | News | Evicted | Refused | Farewell | Heartbeat
KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}


def encoded(message: Message) -> bytes:
    return json.dumps([type(message).__name__, asdict(message)]).encode()


def decoded(payload: bytes) -> Message:
    """The message that these bytes are, or `Unreadable`."""
    try:
        said = json.loads(payload.decode(), parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise Unreadable("it is no JSON") from None
    if not (isinstance(said, list) and len(said) == 2 and isinstance(said[0], str) and said[0] in KINDS):
        raise Unreadable("it is of no known kind")
    return _read(KINDS[said[0]], said[1], said[0])


def shortened(text: str) -> str:
    """A reason that fits into a message."""
    return text[:2000]


def _no_number(text: str) -> float:
    raise ValueError(text)


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise Unreadable(f"its {what} cannot be")


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


def _read(kind: Any, value: Any, where: str) -> Any:
    """``value`` as the declared type, or `Unreadable`."""
    if is_dataclass(kind):
        hints = _hints(kind)  # type: ignore[arg-type]
        if not isinstance(value, dict) or value.keys() != hints.keys():
            raise Unreadable(f"{where} has other fields")
        return kind(**{name: _read(hint, value[name], f"{where}.{name}") for name, hint in hints.items()})  # type: ignore[operator]
    if get_origin(kind) is list:
        (item,) = get_args(kind)
        if type(value) is list and len(value) <= MOST_ITEMS:
            return [_read(item, each, where) for each in value]
    elif get_origin(kind) is dict:
        _, item = get_args(kind)
        if type(value) is dict and len(value) <= MOST_ITEMS:
            return {_read(str, name, where): _read(item, each, where) for name, each in value.items()}
    elif _PLAIN[kind](value):
        return value
    raise Unreadable(f"{where} is no {getattr(kind, '__name__', kind)}, or too long")


_PLAIN: dict[type, Callable[[Any], bool]] = {
    str: lambda value: type(value) is str and len(value) <= LONGEST_TEXT,
    int: lambda value: type(value) is int and abs(value) < LARGEST_NUMBER,
    float: lambda value: type(value) in (int, float) and abs(value) < LARGEST_NUMBER,
    bool: lambda value: type(value) is bool,
}
