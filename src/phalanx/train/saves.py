"""A save: one copy of a rank's state on its way from the device into memory, and from there into files.

copying -> staged -> written -> done, or failed from any of these. It is made in front, between two steps, and carried
behind them; whoever waits for it waits for one of its stages.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.slot import Slot, free_memory
from phalanx.checkpoint.state import Entry
from phalanx.train.engine import Engine


class Stage(IntEnum):
    """How far a save has come, each further than the one before."""

    COPYING = 0
    """Nothing that is copied may change."""
    STAGED = 1
    """Whole in memory."""
    WRITTEN = 2
    """This rank's part is on disk."""
    DONE = 3
    """Nothing is left to do here; on rank 0, what goes to files is committed."""
    FAILED = 4


class Save:
    """One copy of the state, with its stage."""

    def __init__(
        self,
        slot: Slot,
        to_file: bool,
        facts: dict[str, Any],
        numbers: dict[str, Any],
        entries: Sequence[Entry],
        device: torch.device,
    ) -> None:
        """``entries``: what goes into the slot. Those that a forward may change already are copied here and now."""
        self.slot, self.to_file, self.facts, self.numbers = slot, to_file, facts, numbers
        self._copies: list[tuple[Tensor, Tensor]] = []
        for entry, place in zip(entries, slot.lay_out(entries), strict=True):
            if entry.restless:
                place.copy_(entry.value)
            else:
                self._copies.append((place, entry.value))
        self._after = torch.cuda.Event() if device.type == "cuda" else None
        """What the device must have done before the copy may begin."""
        if self._after is not None:
            self._after.record()
        self._moved = threading.Condition()
        self.stage = Stage.COPYING
        self.error: BaseException | None = None
        self.given_up = False
        """Some rank could not write its part: nobody waits for it."""
        self.told = False
        """Callbacks know that it is on disk."""

    @property
    def step(self) -> int:
        return int(self.facts["step"])

    @property
    def over(self) -> bool:
        return self.stage >= Stage.DONE

    @property
    def committed(self) -> bool:
        """On rank 0: it is a checkpoint."""
        return self.to_file and self.stage is Stage.DONE

    def advance(self, stage: Stage, error: BaseException | None = None) -> None:
        """It has come so far."""
        with self._moved:
            assert self.stage < stage, f"a save that is {self.stage.name} does not become {stage.name}"
            self.stage, self.error = stage, error
            self._moved.notify_all()

    def wait(self, stage: Stage) -> None:
        """Until it has come so far, or failed."""
        with self._moved:
            self._moved.wait_for(lambda: self.stage >= stage)

    def copy(self) -> None:
        """Copy the state into the slot, which is whole then."""
        if self._after is None:
            self._copy()
        else:
            stream = torch.cuda.Stream()
            stream.wait_event(self._after)
            with torch.cuda.stream(stream):
                self._copy()
            stream.synchronize()
        self._copies.clear()
        self.slot.seal(self.facts, self.numbers)

    def _copy(self) -> None:
        for place, value in self._copies:
            place.copy_(value)


def short_of_memory(engine: Engine, entries: Sequence[Entry], slots: Sequence[Slot], copies: int) -> str:
    """Why so many copies of each rank's state take more than half of what some host has left; empty if they do not.

    ``slots``: all that this rank writes to. All ranks must ask.
    """
    needed = copies * sum(entry.value.numel() * entry.value.element_size() for entry in entries)
    hosts, free = engine.environment.hosts, free_memory()
    here = hosts.count(hosts[engine.environment.rank])
    needed *= here
    if free is not None:  # what slots of the generation before have is theirs already
        free += here * sum(slot.size() for slot in slots)
    short = [f"{needed:,} bytes, and {free:,} are free"] if free is not None and needed > free / 2 else []
    return next((words for said in engine.mesh.world.all_gather_words(short) for words in said), "")
