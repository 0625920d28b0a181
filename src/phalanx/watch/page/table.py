"""The events of all ranks of a run as columns, read on as they grow; steps count as they were last done."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from phalanx.run import Run
from phalanx.watch.page.grid import StepGrid
from phalanx.watch.page.lines import Columns, read

PHASES = ("data", "forward", "backward", "wait", "reduce", "update")
"""As they follow each other in a step; those that are not among them come after."""
OWN = ("time", "step", "seconds", "sent")
"""What a step's event has of its rank alone; all else is the same for all of them."""
_HASH = re.compile(rb'"samples": "[0-9a-f]*"')
_SHARED = re.compile(rb', "loss": .*?, "seconds": \{')


@dataclass
class EventFile:
    """One rank's file of events, as far as it was read."""

    rank: int
    offset: int = 0
    inode: int = 0
    generation: int = 0
    """Of the ranks that last wrote to it."""

    def more(self, run: Run) -> bytes:
        """Whole lines that were written since; of a file that another has replaced, all of them."""
        path = run.events_path(self.rank)
        try:
            with path.open("rb") as file:
                file.seek(0, 2)
                size, inode = file.tell(), path.stat().st_ino
                if inode != self.inode or size < self.offset:
                    self.offset, self.inode = 0, inode
                if size == self.offset:
                    return b""
                file.seek(self.offset)
                data = file.read(size - self.offset)
        except OSError:  # taken away
            return b""
        data = data[: data.rfind(b"\n") + 1]
        self.offset += len(data)
        return data


@dataclass
class RunTable:
    """``refresh`` reads what is new. ``version`` grows with it, and `changed` tells from which step on it differs."""

    run: Run
    seconds: dict[str, StepGrid] = field(default_factory=dict)
    """By phase."""
    sent: dict[str, StepGrid] = field(default_factory=dict)
    """Bytes, by axis."""
    ended: StepGrid = field(default_factory=StepGrid)
    """When each rank had done each step, by its host's clock."""
    shared: dict[str, StepGrid] = field(default_factory=dict)
    """What all ranks have in common, by name, as the first rank tells it: a loss, a norm, what the task logs."""
    moments: list[dict[str, Any]] = field(default_factory=list)
    """Other events in the order of their times, without lists in them, each with its rank: starts, checkpoints."""
    version: int = 0
    _files: dict[int, EventFile] = field(default_factory=dict)
    _changes: list[tuple[int, int]] = field(default_factory=list)
    _begins: dict[int, int] = field(default_factory=dict)
    """By generation: the step that it went on with."""

    @property
    def steps(self) -> int:
        """So many have been done, by the first rank's events."""
        done = self.ended.values[:1]
        return int(np.flatnonzero(np.isfinite(done).any(0)).max(initial=-1)) + 1

    @property
    def ranks(self) -> int:
        return self.ended.ranks

    @property
    def phases(self) -> list[str]:
        known = [phase for phase in PHASES if phase in self.seconds]
        return known + sorted(self.seconds.keys() - set(known))

    def changed(self, since: int) -> int:
        """The first step that is other than it was in that version; past the last one: none is."""
        return min((step for version, step in self._changes if version > since), default=self.steps)

    def refresh(self) -> bool:
        """Whether there was anything new."""
        first = None
        for path in (self.run.path / "events").glob("rank-*.jsonl"):
            if re.fullmatch(r"rank-\d{5,9}", path.stem):
                self._files.setdefault(int(path.stem[5:]), EventFile(int(path.stem[5:])))
        for _, file in sorted(self._files.items()):
            known = file.offset
            data = file.more(self.run)
            if data:
                if known and file.offset == len(data):  # another file of the same name
                    self._cut(file.rank, 0)
                step = self._take(file, data)
                first = step if first is None else min(first, step)
        if first is None:
            return False
        self._forget_undone()
        self.moments.sort(key=lambda event: event.get("time", 0.0))
        self.version += 1
        self._changes = [*self._changes[-200:], (self.version, first)]
        if len(self._changes) > 200:
            self._changes[0] = (self._changes[0][0], 0)
        return True

    def _take(self, file: EventFile, data: bytes) -> int:
        """Take in more of a rank's lines; the first step that they change."""
        if b'"samples": "' in data:  # a writer of what all ranks share: the first one's are taken
            data = _SHARED.sub(b', "seconds": {', data) if file.rank else _HASH.sub(b'"samples": ""', data)
        many, single = read(data)
        cuts = [(at, int(event.get("step", 0))) for at, event in single if event.get("kind") in ("start", "rollback")]
        if cuts:
            self._cut(file.rank, min(step for _, step in cuts))
        lowest = min((step for _, step in cuts), default=self.steps)
        for columns in [*many, *_one_by_one(single)]:
            if columns.first.get("kind") == "step" and ("step",) in columns.values:
                lowest = min(lowest, self._take_steps(file.rank, columns, cuts))
        for _, event in single:
            if event.get("kind") not in ("step", None):
                self._take_moment(file, event)
        return lowest

    def _take_steps(self, rank: int, columns: Columns, cuts: list[tuple[int, int]]) -> int:
        steps = columns.values[("step",)].astype(np.int64)
        counts = steps >= 0
        for at, step in cuts:  # those before it that it does again
            counts &= ~((columns.lines < at) & (steps >= step))
        steps = steps[counts]
        turn = str(columns.first.get("turn") or "")
        for name, values in columns.values.items():
            self._grid(rank, name, turn).put(rank if name[0] in OWN else 0, steps, values[counts])
        for word, value in columns.first.items():
            if value in ("nan", "inf", "-inf"):  # as `events.plain` writes them
                self._grid(rank, (word,), turn).put(0, steps, float(value))
        if columns.first.get("skipped"):
            self.shared.setdefault("skipped", StepGrid()).put(0, steps, 1.0)
        return int(steps.min()) if len(steps) else self.steps

    def _grid(self, rank: int, name: tuple[str, ...], turn: str) -> StepGrid:
        for own, grids, kind in (("seconds", self.seconds, np.float32), ("sent", self.sent, np.float64)):
            if name[0] == own and len(name) == 2:
                if name[1] not in grids:
                    grids[name[1]] = StepGrid(kind, len(self._files))
                return grids[name[1]]
        if name == ("time",):
            return self.ended
        if name == ("step",) or rank:
            return StepGrid()
        return self.shared.setdefault(
            "/".join(name) + (f" of {turn}" if turn and name[0] == "loss" else ""), StepGrid()
        )

    def _take_moment(self, file: EventFile, event: dict[str, Any]) -> None:
        if event["kind"] == "start":
            file.generation = max(file.generation, int(event.get("generation", 0)))
            self._begins[file.generation] = int(event.get("step", 0))
        if event["kind"] == "evaluation" and not file.rank:
            for name, value in event.get("held_out", {}).items():
                number = _number(value)
                if number is not None:
                    step = np.array([int(event["step"])])
                    self.shared.setdefault(f"held out/{name}", StepGrid()).put(0, step, number)
        kept = {name: value for name, value in event.items() if not isinstance(value, (list, dict))}
        self.moments.append({**kept, "rank": file.rank})

    def _cut(self, rank: int, step: int) -> None:
        own = [self.ended, *self.seconds.values(), *self.sent.values()]
        for grid in [*own, *(() if rank else self.shared.values())]:
            grid.cut(rank, step)

    def _forget_undone(self) -> None:
        """What ranks did that are not there any more, and others have done again; and what was left out."""
        for file in self._files.values():
            later = [step for generation, step in self._begins.items() if generation > file.generation]
            if later:
                for grid in (self.ended, *self.seconds.values(), *self.sent.values()):
                    grid.cut(file.rank, min(later))
        left = sorted({int(event["step"]) for event in self.moments if event["kind"] == "left out"})
        if left:
            for grid in (self.ended, *self.seconds.values(), *self.sent.values(), *self.shared.values()):
                grid.leave_out(left)


def _one_by_one(events: list[tuple[int, dict[str, Any]]]) -> Iterator[Columns]:
    """Steps that came alone, or in a shape of their own, by the numbers they have."""
    alike: dict[tuple, list[tuple[int, dict[str, Any], list[float]]]] = {}
    for at, event in events:
        if event.get("kind") == "step":
            names, values = zip(*_numbers(event), strict=True)
            key = (names, event.get("turn"), bool(event.get("skipped")))
            alike.setdefault(key, []).append((at, event, list(values)))
    for (names, *_), found in alike.items():
        table = np.array([values for *_, values in found])
        first = {name: value for name, value in found[0][1].items() if (name,) not in names}
        yield Columns(np.array([at for at, *_ in found]), dict(zip(names, table.T, strict=True)), first)


def _numbers(event: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    for name, value in event.items():
        if isinstance(value, dict):
            yield from _numbers(value, (*above, name))
        elif (number := _number(value)) is not None:
            yield (*above, name), number


def _number(value: Any) -> float | None:
    """A number, those among them that JSON has no word for."""
    if value in ("nan", "inf", "-inf") or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return float(value)
    return None
