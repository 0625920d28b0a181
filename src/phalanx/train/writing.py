"""A staged copy written to files, behind the steps: a rank's part of a checkpoint, which rank 0 commits.

What keeps it from being written costs that save alone. It is said once, tried again, and said when it works again.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable

from phalanx.checkpoint.best import Best
from phalanx.checkpoint.index import groups
from phalanx.checkpoint.manager import CheckpointManager
from phalanx.checkpoint.slot import Staged
from phalanx.checkpoint.write import shards
from phalanx.events import say
from phalanx.files import no_room
from phalanx.train.engine import Engine
from phalanx.train.guard import BadNumbers, first_not_finite

HOUR = 3600.0
"""How long the parts of other ranks are waited for at least: storage may be slow."""
ROOM = 1.1
"""So many times the size of a checkpoint must be free before one is begun."""
RETRY_SECONDS = 30.0
"""A save that failed is tried again no sooner."""


class Writer:
    """A rank's. ``keep`` and ``keep_every`` say which older checkpoints stay."""

    def __init__(
        self,
        engine: Engine,
        manager: CheckpointManager,
        generation: int,
        keep: int,
        keep_every: int,
        note: Callable[..., None],
        settle: Callable[[], bool],
    ) -> None:
        """``settle`` waits until what was noted is in the run's folder, and says whether it is."""
        self.engine, self.manager, self.generation, self.note = engine, manager, generation, note
        self.keep, self.keep_every = keep, keep_every
        self.settle = settle
        self._failing = ""
        self._failed_at = 0.0
        self.best: Best | None = None
        """A checkpoint to be noted as the best once it is saved."""

    def write(self, staged: Staged, written: Callable[[], None], given_up: Callable[[], bool]) -> None:
        """Write this rank's part, tell that it is ``written``, and on rank 0 commit all of them."""
        began, rank, step = time.monotonic(), self.engine.environment.rank, staged.step
        if not self.settle():  # the steps that led here are accounted for before anybody can go on from it
            say(f"   note  step {step} is saved before its events are written: the run's folder does not take them")
        self._check_weights(staged)
        self._check_room(staged)
        if rank == 0:
            self.manager.abandon(self.generation, but=step)  # what a rank still wrote of one that others gave up
        world, patience = self.engine.environment.world, max(HOUR, self.engine.timeout.total_seconds())
        try:
            self.manager.write(self.generation, step, rank, shards(staged), staged.facts, staged.numbers)
            written()
            for ranks in groups(world):
                if ranks.start == rank:
                    self.manager.gather(self.generation, step, ranks, patience, given_up)
            if rank:
                self._failing = ""
                return
            saved = self.manager.commit(self.generation, step, world, patience, given_up)
        except Exception:
            if rank == 0:
                self.manager.abandon(self.generation)
            raise
        if self._failing:
            say(f"   note  step {step} is saved: checkpoints can be written again")
            self._failing = ""
        if self.best is not None and self.best.step == step:
            self.manager.note_best(self.best)
        gone: list[int] = []
        if staged.facts["good"] is not None:  # else any may be the only good one
            sure = (staged.facts["compared"], staged.facts["good"])
            gone = self.manager.retain(step, self.keep, self.keep_every, sure)
        self.note(
            "checkpoint", step=step, path=saved.where, bytes=saved.manifest.size, hash=saved.manifest.hash(),
            seconds=time.monotonic() - began, let_go=gone,
        )  # fmt: skip

    def failed(self, step: int, error: BaseException) -> None:
        """A save did not succeed: note it, and say so unless the one before failed for the same reason."""
        reason, kind = f"{type(error).__name__}: {error}", "no room" if no_room(error) else type(error).__name__
        if kind != self._failing:
            say(f"   note  step {step} could not be saved, going on: {reason}")
        self._failing, self._failed_at = kind, time.monotonic()
        self.note("checkpoint", step=step, failed=reason)

    @property
    def due_again(self) -> bool:
        """Whether a save that failed should be tried again."""
        return bool(self._failing) and time.monotonic() - self._failed_at > RETRY_SECONDS

    def _check_weights(self, staged: Staged) -> None:
        """Weights that are not finite are not saved. Buffers may be so on purpose."""
        weights = {f"model/{name}" for name, weight in self.engine.spread.weights.items() if weight.trainable}
        bad = first_not_finite((place.name, tensor) for place, tensor in staged.tensors if place.name in weights)
        if bad:
            raise BadNumbers(f"{bad.removeprefix('model/')} is not finite")

    def _check_room(self, staged: Staged) -> None:
        needed = sum(tensor.numel() * tensor.element_size() for place, tensor in staged.tensors if place.written)
        needed = int(ROOM * needed * (self.engine.environment.world if self.engine.environment.rank == 0 else 1))
        free = self.manager.store.free()
        if free is not None and free < needed:
            words = f"{self.manager.store.url} has {free:,} bytes free and about {needed:,} are needed"
            raise OSError(errno.ENOSPC, words)
