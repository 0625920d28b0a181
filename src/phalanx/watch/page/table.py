"""The events of all ranks of a run as columns, read on as they grow; steps count as they were last done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from phalanx.event_fields import LARGEST, NOT_FINITE, is_figure
from phalanx.folder_files import note
from phalanx.run import Run
from phalanx.watch.page.grid import NoRoom, Room, StepChanges, StepGrid
from phalanx.watch.page.lines import Columns
from phalanx.watch.page.reading import EXPOSED, MEMORY, EventFile, NewLines, is_own, known_files, read_on

MOST_NAMES = 64
"""So many phases are told apart, and axes, and uses of memory."""
WIDEST = 1000
"""So many steps a line may have the means of."""
PHASES = ("data", "forward", "backward", "wait", "reduce", "update")
"""As they follow each other in a step; those that are not among them come after."""


@dataclass
class RunTable:
    """``refresh`` reads what is new. ``version`` grows with it, and `changed` tells from which step on it differs."""

    run: Run
    seconds: dict[str, StepGrid] = field(default_factory=dict)
    """By phase."""
    sent: dict[str, StepGrid] = field(default_factory=dict)
    """Bytes, by axis."""
    exposed: dict[str, StepGrid] = field(default_factory=dict)
    """Seconds that a rank did nothing but wait for others, by axis."""
    memory: dict[str, StepChanges] = field(default_factory=dict)
    """Bytes, by what they are for."""
    ended: StepGrid = field(init=False)
    """When each rank had done each step, by its host's clock."""
    shared: dict[str, StepGrid] = field(default_factory=dict)
    """What all ranks have in common, by name, as the first rank tells it: a loss, a norm, what the task logs."""
    moments: list[dict[str, Any]] = field(default_factory=list)
    """Other events in the order of their times, without lists in them, each with its rank: starts, checkpoints."""
    version: int = 0
    left_out: str = ""
    """What of the events there was no room for."""
    _room: Room = field(default_factory=Room)
    _files: dict[int, EventFile] = field(default_factory=dict)
    _changes: list[tuple[int, int]] = field(default_factory=list)
    _begins: dict[int, int] = field(default_factory=dict)
    """By generation: the step that it went on with."""
    _generations: dict[int, int] = field(default_factory=dict)
    """By rank: the last that it was one of."""

    def __post_init__(self) -> None:
        self.ended = StepGrid(room=self._room)

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

    def files(self) -> list[EventFile]:
        """Those of all ranks that have written any, as far as they were read."""
        for rank in known_files(self.run):
            self._files.setdefault(rank, EventFile(rank))
        return [file for _, file in sorted(self._files.items())]

    def refresh(self) -> bool:
        """Read on; whether there was anything new."""
        files, found = self.files(), False
        while files:
            found |= self.take(map(partial(read_on, self.run), files))
            files = [file for file in files if file.unread]
        return found

    def take(self, lines: Iterable[NewLines | None]) -> bool:
        """Take in what was read; whether there was anything."""
        first = None
        for new in lines:
            if new is not None:
                step = self._take(new)
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

    def _take(self, new: NewLines) -> int:
        """Take in more of a rank's lines; the first step that they change."""
        rank, single = new.file.rank, new.single
        self._files[rank] = new.file  # as another process may have read it
        self._room.read(new.size)
        if new.another:
            self._cut(rank, 0)
        cuts = [(at, int(event.get("step", 0))) for at, event in single if event.get("kind") in ("start", "rollback")]
        if cuts:
            self._cut(rank, min(step for _, step in cuts))
        lowest = min((step for _, step in cuts), default=self.steps)
        steps = [each for each in [*new.many, *_one_by_one(single)] if ("step",) in each.values]
        for columns in sorted(steps, key=lambda each: ("of",) in each.values):  # means, after what they leave open
            if columns.first.get("kind") == "step":
                lowest = min(lowest, self._take_steps(rank, columns, cuts))
        for _, event in single:
            if event.get("kind") not in ("step", None):
                self._take_moment(rank, event)
        return lowest

    def _take_steps(self, rank: int, columns: Columns, cuts: list[tuple[int, int]]) -> int:
        steps = columns.values[("step",)]
        counts = (steps >= 0) & (steps < LARGEST)
        steps = np.where(counts, steps, -1).astype(np.int64)
        for at, step in cuts:  # those before it that it does again
            counts &= ~((columns.lines < at) & (steps >= step))
        steps = steps[counts]
        widths = np.clip(columns.values.pop(("of",), np.ones(len(counts)))[counts], 1, WIDEST).astype(np.int64)
        turn = str(columns.first.get("turn") or "")
        try:
            for name, values in columns.values.items():
                self._put(rank, name, turn, steps, widths, values[counts])
            for word, value in columns.first.items():
                if value in NOT_FINITE and (grid := self._grid(rank, (word,), turn)) is not None:
                    grid.put(0, steps, float(value))
            if columns.first.get("skipped"):
                self._shared("skipped").put(0, steps, 1.0)
        except NoRoom:
            self.left_out = (
                f"{self.run.events_path(rank)} names rank {rank} and step {int(steps.max())}, far more than its events "
                "are: they are left out."
            )
            note(self.left_out)
        return int((steps + 1 - widths).min()) if len(steps) else self.steps

    def _put(
        self, rank: int, name: tuple[str, ...], turn: str, steps: np.ndarray, widths: np.ndarray, values: np.ndarray
    ) -> None:
        grid, row = self._grid(rank, name, turn), rank if is_own(name[0]) else 0
        if grid is not None:
            grid.put(row, steps, values)
        if isinstance(grid, StepGrid) and len(steps) and widths.max() > 1:
            grid.fill(row, steps, widths, values)

    def _shared(self, name: str) -> StepGrid:
        return self.shared.setdefault(name, StepGrid(room=self._room))

    def _grid(self, rank: int, name: tuple[str, ...], turn: str) -> StepGrid | StepChanges | None:
        """Where numbers of this name are kept; None: they are not."""
        own: dict[str, tuple[dict[str, StepGrid], type[np.floating]]] = {
            "seconds": (self.seconds, np.float32), "sent": (self.sent, np.float64), EXPOSED: (self.exposed, np.float32),
        }  # fmt: skip
        head, *tail = (EXPOSED, name[0].removeprefix(EXPOSED)) if name[0].startswith(EXPOSED) else name
        if head in own and len(tail) == 1:
            grids, kind = own[head]
            if tail[0] not in grids:
                if len(grids) >= MOST_NAMES:
                    self._too_many(rank, name)
                    return None
                grids[tail[0]] = StepGrid(kind, len(self._files), self._room)
            return grids[tail[0]]
        if head.startswith(MEMORY):
            if len(self.memory) >= MOST_NAMES and head.removeprefix(MEMORY) not in self.memory:
                self._too_many(rank, name)
                return None
            return self.memory.setdefault(head.removeprefix(MEMORY), StepChanges())
        if name == ("time",):
            return self.ended
        if rank or is_own(head):
            return None
        return self._shared("/".join(name) + (f" of {turn}" if turn and name[0] == "loss" else ""))

    def _too_many(self, rank: int, name: tuple[str, ...]) -> None:
        kind = name[0].partition("_")[0]
        self.left_out = f"{self.run.events_path(rank)} has numbers of more than {MOST_NAMES} names like {kind}."
        note(self.left_out)

    def _take_moment(self, rank: int, event: dict[str, Any]) -> None:
        if event["kind"] == "start":
            generation = max(self._generations.get(rank, 0), int(event.get("generation", 0)))
            self._generations[rank] = generation
            self._begins[generation] = int(event.get("step", 0))
        if event["kind"] == "evaluation" and not rank:
            for name, value in event.get("held_out", {}).items():
                number = _number(value)
                if number is not None:
                    with suppress(NoRoom):
                        self._shared(f"held out/{name}").put(0, np.array([event["step"]]), number)
        kept = {name: value for name, value in event.items() if not isinstance(value, (list, dict))}
        self.moments.append({"time": 0.0, **kept, "rank": rank})

    @property
    def _own(self) -> list[StepGrid]:
        """What each rank has for itself, but for its memory."""
        return [self.ended, *self.seconds.values(), *self.sent.values(), *self.exposed.values()]

    def _cut(self, rank: int, step: int) -> None:
        own: list[StepGrid | StepChanges] = [*self._own, *self.memory.values()]
        for grid in [*own, *(() if rank else self.shared.values())]:
            grid.cut(rank, step)

    def _forget_undone(self) -> None:
        """What ranks did that are not there any more, and others have done again; and what was left out."""
        for rank, last in self._generations.items():
            later = [step for generation, step in self._begins.items() if generation > last]
            if later:
                own: list[StepGrid | StepChanges] = [*self._own, *self.memory.values()]
                for grid in own:
                    grid.cut(rank, min(later))
        left = sorted({int(event["step"]) for event in self.moments if event["kind"] == "left out"})
        if left:
            for known in (*self._own, *self.shared.values()):
                known.leave_out(left)


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
    return float(value) if is_figure(value) else None
