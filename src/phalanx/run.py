"""The Run: one run on disk. Every tool reads and writes this folder and nothing else.

runs/<name>/run.toml                   settings as resolved; ``phalanx train --config run.toml`` repeats the run
runs/<name>/events/rank-00000.jsonl    one JSON object a line: start, step, evaluation, failure, end
runs/<name>/final/model.safetensors    full weights under the model's own names
"""

from __future__ import annotations

import json
import math
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from phalanx.errors import WrongUse

Settings = Mapping[str, Any]


class Run:
    """A run's folder. `create` makes a new one; ``Run(path)`` opens one that is there."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    def create(cls, path: str | Path | None, name: str) -> Run:
        """A new folder: the one asked for, which must not hold a run, or the next free ``runs/<name>-<number>``."""
        if path is not None and cls(path).settings_path.exists():
            raise WrongUse(f"{path} holds a run already. Give another --run, or remove that folder.")
        return cls.folder(path, name)

    @classmethod
    def folder(cls, path: str | Path | None, name: str) -> Run:
        """The folder asked for, made if it is not there, or the next free ``runs/<name>-<number>``."""
        if path is not None:
            _make(Path(path), exist_ok=True)
            return cls(path)
        number = 1
        while True:
            try:
                candidate = Path("runs") / f"{name}-{number:03d}"
                _make(candidate)
                return cls(candidate)
            except FileExistsError:  # taken, perhaps by another run that starts at this moment
                number += 1

    @property
    def settings_path(self) -> Path:
        return self.path / "run.toml"

    @property
    def weights_path(self) -> Path:
        return self.path / "final" / "model.safetensors"

    def events_path(self, rank: int) -> Path:
        return self.path / "events" / f"rank-{rank:05d}.jsonl"

    def write_settings(self, settings: Mapping[str, Settings]) -> None:
        """Write ``run.toml``, a table a section. Values that are None are left out."""
        self.settings_path.write_text(to_toml(settings))

    def settings(self) -> dict[str, dict[str, Any]]:
        return read_settings(self.settings_path)

    def events(self, rank: int) -> Iterator[dict[str, Any]]:
        """What a rank wrote, in order, if anything. A line cut short by a kill is the last one and is left out."""
        if not self.events_path(rank).exists():
            return
        with self.events_path(rank).open() as lines:
            for line in lines:
                if line.endswith("\n"):
                    yield json.loads(line)


def _make(path: Path, exist_ok: bool = False) -> None:
    try:
        path.mkdir(parents=True, exist_ok=exist_ok)
    except OSError as error:
        if isinstance(error, FileExistsError) and not exist_ok:
            raise
        raise WrongUse(f"{path} cannot be made: {error.strerror}. Give another folder with --run.") from None


def read_settings(path: Path) -> dict[str, dict[str, Any]]:
    """The tables of a ``run.toml``."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise WrongUse(f"{path} is not there. Give the run.toml of a run's folder.") from None
    except tomllib.TOMLDecodeError as error:
        raise WrongUse(f"{path} is not valid TOML: {error}. Mend that line, or take the file of another run.") from None


class EventLog:
    """Appends a rank's events, each flushed as it is written."""

    def __init__(self, run: Run, rank: int) -> None:
        path = run.events_path(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("a", buffering=1)

    def write(self, kind: str, **fields: Any) -> None:
        self._file.write(json.dumps({"kind": kind, "time": time.time(), **plain(fields)}) + "\n")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.write("failure", reason=f"{type(error).__name__}: {error}")
        self.close()


def plain(value: Any) -> Any:
    """What JSON has no word for, nan and inf and paths among it, as text."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def to_toml(tables: Mapping[str, Settings]) -> str:
    """Tables of plain values as TOML, which the standard library reads but does not write."""
    lines: list[str] = []
    for table, values in tables.items():
        lines.append(f"[{table}]")
        lines.extend(f"{name} = {_toml_value(value)}" for name, value in values.items() if value is not None)
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return json.dumps(str(value), ensure_ascii=False)
