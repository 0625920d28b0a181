"""Keeping a run's state: staged in memory every few steps, and written to files by policy.

Staging copies this rank's state into a slot while the next step's forward and backward run: nothing that is copied
changes before the next update, which waits for the copy alone. All else, hashes and files, happens behind the steps.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path

import torch

from phalanx.callbacks import Callback
from phalanx.checkpoint.best import Best
from phalanx.checkpoint.manager import CheckpointManager
from phalanx.checkpoint.slot import Slot
from phalanx.checkpoint.state import Entry, State
from phalanx.checkpoint.store import open_store
from phalanx.errors import CannotHere, WrongUse
from phalanx.events import say
from phalanx.files import no_room, pauses
from phalanx.train.engine import Engine
from phalanx.train.guard import BadNumbers, first_not_finite
from phalanx.train.neighbours import Neighbours
from phalanx.train.policy import Policy
from phalanx.train.restoring import steps_seen
from phalanx.train.saves import Save, Stage, short_of_memory
from phalanx.train.signals import Signals
from phalanx.train.writing import Writer

Note = Callable[..., None]
REST = 20
"""After a copy that a step had to wait for, the next one in memory comes no sooner than so many times that wait."""
REST_OF_LINKS = 10
"""Likewise after one that went to another host, since steps need the same link: so many times as long as that took."""
FULL_ATTEMPTS = 125
"""So often, for about an hour, the last save is tried on a disk that is full."""


def save(engine: Engine, folder: str | Path) -> str:
    """Write a checkpoint of the engine's state into a folder, or under a URL; where it is. All ranks must call it."""
    checkpointer = Checkpointer(engine, CheckpointManager(open_store(folder)), Policy(keep=sys.maxsize))
    try:
        if engine.environment.rank == 0:
            checkpointer.manager.abandon(0)  # what an attempt that was cut short has left
        engine.mesh.world.all_gather_words([])
        checkpointer.save_now()
        return f"{checkpointer.manager.store.url}/{checkpointer.manager.name(engine.step_number)}"
    finally:
        checkpointer.close()


class Checkpointer(Callback):
    """A rank's checkpointer of state. Everything it decides, all ranks decide alike."""

    def __init__(
        self,
        engine: Engine,
        manager: CheckpointManager,
        policy: Policy,
        *,
        generation: int = 0,
        slots: Sequence[Slot] = (),
        guests: Sequence[Sequence[Slot]] | None = None,
        note: Note | None = None,
        settle: Callable[[], bool] = lambda: True,
    ) -> None:
        """``slots`` are this rank's; ``guests``, where hosts exchange copies, for those of ranks of the host before.

        ``settle`` waits until what was noted is in the run's folder, and says whether it is.
        """
        self.engine, self.manager, self.policy, self.generation = engine, manager, policy, generation
        self._own = [] if slots else [Slot(), Slot()]
        self.slots, self.guests = list(slots) or self._own, guests or ()
        for slot in self.slots:
            slot.pinned = engine.device.type == "cuda"
        self.neighbours = None if guests is None else Neighbours(engine, guests)
        nobody: Note = lambda kind, **fields: None  # noqa: E731
        self.writer = Writer(engine, manager, generation, policy.keep, policy.keep_every, note or nobody, settle)
        beside, left_out = engine.callbacks.tensors(), engine.frozen.names
        self.state = State(engine.spread, engine.optimizer, engine.environment.hosts, beside, left_out)
        if engine.environment.rank == 0:
            self._begin()
        self._saved_at = time.monotonic()
        self._rest_until = 0.0
        self._owed = False
        """A file was due while another was being written."""
        self.may_take_long: Callable[[], object] = lambda: None
        """Told before something that may take much longer than a step."""
        self._frugal: bool | None = None
        """One slot, for files alone; None: not known yet."""
        self._last: Save | None = None
        """The newest, the only one that may still be under way."""
        self._queue: queue.SimpleQueue[Save | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._background, name="checkpointer", daemon=True)
        self._thread.start()
        self._files = ThreadPoolExecutor(1, "files", initializer=_behind_the_steps)
        engine.callbacks.add(self)

    def _begin(self) -> None:
        try:
            self.manager.fence(self.generation)
        except OSError as error:
            raise CannotHere(f"{self.manager.store.url} cannot be written to: {error.strerror or error}.") from None
        if warning := self.manager.store.warning():
            say(f"   note  {warning}")

    # In front: between two steps, on every rank.

    @property
    def busy(self) -> bool:
        """Whether a file is being written, or a copy is on its way to another host: neither is waited for."""
        last = self._last
        return last is not None and not last.over and (last.to_file or self.neighbours is not None)

    def before_step(self) -> None:
        """Tell the others, with the step's one sum, what this rank wants and whether it is ready."""
        signals, last, first = self.engine.signals, self._last, self.engine.environment.rank == 0
        if first and (self.policy.time_due(time.monotonic() - self._saved_at) or self.writer.due_again):
            signals.save = True
        signals.busy = self.busy
        signals.resting = time.monotonic() < self._rest_until
        signals.failed = last is not None and last.error is not None
        signals.saved = first and last is not None and last.committed and not last.told

    def after_step(self, signals: Signals, last: bool) -> None:
        """Keep what is due."""
        steps, policy = self.engine.just_agreed, self.policy
        if self._last is not None and signals.saved:
            self._tell(self._last)
        if self._last is not None and signals.failed:
            self._last.given_up = True
        due = any(map(policy.file_due, steps))  # for which the file before it is waited for
        save = due or signals.save or self._owed
        stage = save or any(map(policy.copy_due, steps))
        if last or signals.stop:
            self.save_now()
        elif stage and not due and (signals.busy or (signals.resting and not save)):
            self._owed = save
        elif stage:
            self._owed = False
            if signals.busy:
                self.may_take_long()
                self.settled()
            self.stage(save)

    def save_now(self) -> None:
        """Have this step on disk when this returns; a full disk is waited for."""
        self.settled()
        if self.engine.step_number in steps_seen(self.engine, self.manager):
            return
        self.check_weights()
        for pause in islice(pauses(), FULL_ATTEMPTS):
            self.stage(save=True)
            reasons = self.settled()
            if not reasons:
                return
            if not any("no room" in reason for reason in reasons):
                break
            self.may_take_long()
            time.sleep(pause)
        raise CannotHere(
            f"the state after step {self.engine.step_number} could not be saved: {reasons[-1][0]}. "
            f"Mend that and go on with --resume, {self._from_where()}."
        )

    def keep_best(self, best: Best) -> None:
        """Keep the state after this step beside the last ones, until a better one is saved. All ranks must call it."""
        self.settled()
        if best.step in steps_seen(self.engine, self.manager):
            if self.engine.environment.rank == 0:
                self.manager.note_best(best)
            return
        self.writer.best = best
        self.stage(save=True)

    def _from_where(self) -> str:
        """Where a run would go on from."""
        saved = max(self.manager.steps(), default=None)
        where = self.manager.store.url
        return f"from step 0: there is no checkpoint in {where}" if saved is None else f"from step {saved} in {where}"

    def check_weights(self) -> None:
        """Refuse, on all ranks alike, to take weights that are not finite for a result."""
        weights = self.engine.spread.weights.items()
        own = first_not_finite((name, weight.shard.data) for name, weight in weights if weight.trainable)
        found = [name for said in self.engine.mesh.world.all_gather_words([own]) for name in said if name]
        if found:
            raise BadNumbers(
                f"{found[0]} is not finite after step {self.engine.step_number}, so nothing was saved. Lower the "
                f"learning rate, and go on with --resume, {self._from_where()}."
            )

    def settled(self) -> list[list[str]]:
        """Wait until nothing is under way on any rank, nor for a part that could not be written; why it could not."""
        last = self._last
        if last is None:
            return []
        last.wait(Stage.WRITTEN)
        last.given_up = bool(self._reasons(last))
        last.wait(Stage.DONE)
        reasons = self._reasons(last)
        if last.to_file and not reasons:
            self._tell(last)
        return reasons

    def _tell(self, save: Save) -> None:
        """A save is on disk, as all ranks know: tell callbacks, once."""
        if not save.told:
            save.told = True
            where = f"{self.manager.store.url}/{self.manager.name(save.step)}"
            self.engine.callbacks.call("on_checkpoint", self.engine, save.step, where)

    def _reasons(self, save: Save) -> list[list[str]]:
        """Why ranks could not save; rank 0, which misses the parts of others then, comes first."""
        own = [] if save.error is None else [str(save.error), *(["no room"] if no_room(save.error) else [])]
        return [reasons for reasons in self.engine.mesh.world.all_gather_words(own) if reasons]

    def stage(self, save: bool) -> None:
        """Begin to copy the state as it is now."""
        engine = self.engine
        if not engine.just_agreed:
            raise WrongUse(
                f"after step {engine.step_number} sites train by themselves (comm={engine.layout.comm}), and no state "
                "is that of all. Save when engine.just_agreed is not empty: after the steps after which they agree."
            )
        self.drain()
        engine.frozen.keep_written()
        entries = [entry for entry in self.state.entries() if entry.kept]
        if self._is_frugal(entries) and not save:
            return
        slot = self.slots[0] if self._frugal else min(self.slots, key=lambda slot: slot.step() or -1)
        if slot.step() is None:
            self.may_take_long()  # its memory has to be got first
        if save:
            self._saved_at = time.monotonic()
            engine.signals.save = False
        facts = engine.facts() | engine.frozen.facts(self.state)
        facts |= {"generation": self.generation, "rank": engine.environment.rank}
        if engine.sites is not None:
            facts["callbacks"] = engine.sites.as_the_first(facts["callbacks"])
        self._last = Save(slot, save, facts, self.state.numbers(), entries, engine.device)
        self._queue.put(self._last)

    def _is_frugal(self, entries: Sequence[Entry]) -> bool:
        """Whether memory is short, found the first time."""
        if self._frugal is None:
            copies = 2 if self.neighbours is None else 4  # those of the host before it, too
            why = short_of_memory(self.engine, entries, self._every_slot(), copies)
            if why and self.policy.memory_steps and self.engine.environment.rank == 0:
                say(f"   note  no copies in memory: two of them on a host would take {why}")
            self._frugal = bool(why)
        return self._frugal

    def _every_slot(self) -> list[Slot]:
        """All that this rank writes to."""
        return [*self.slots, *(slot for slots in self.guests for slot in slots)]

    def distrust(self, after: int | None) -> None:
        """What was kept since a step may be wrong: it is put aside, so that nobody goes on from it."""
        self.settled()
        if self.engine.environment.rank == 0:
            self.manager.distrust(0 if after is None else after)
        for slot in self._every_slot():
            slot.void()
        self.engine.mesh.world.all_gather_words([])  # nobody leaves before all of it is done

    def before_update(self, engine: Engine) -> None:
        """The copy of what it will change must be whole."""
        if self._last is not None and self._last.stage < Stage.STAGED:
            began = time.monotonic()
            with engine.traffic.recorder.during("checkpoint"):
                self._last.wait(Stage.STAGED)
            self._rests(REST * (time.monotonic() - began))

    def _rests(self, seconds: float) -> None:
        """Copy nothing that goes to no file for so long."""
        self._rest_until = max(self._rest_until, time.monotonic() + seconds)

    def drain(self) -> None:
        """Wait until nothing is under way here."""
        if self._last is not None:
            self._last.wait(Stage.DONE)

    def close(self, wait: bool = True) -> None:
        """End; without ``wait`` what is under way is left to end with the process."""
        self.engine.callbacks.remove(self)
        self._queue.put(None)
        if not wait:
            return
        self._thread.join()
        self._files.shutdown()
        if self.engine.environment.rank == 0:
            self.manager.close(self.generation)
        if self.neighbours is not None:
            self.neighbours.close()
        for slot in self.slots:
            slot.unpin()
        for slot in self._own:
            slot.close()

    # Behind: one copy at a time, while steps go on.

    def _background(self) -> None:
        if self.engine.device.type == "cuda":
            torch.cuda.set_device(self.engine.device)  # a thread begins with the first one
        while (save := self._queue.get()) is not None:
            try:
                self._carry(save)
            except BaseException as error:
                with suppress(Exception):  # whoever waits must not wait for ever, nor the next save for this thread
                    self.writer.failed(save.step, error)
                save.advance(Stage.FAILED, error)

    def _carry(self, save: Save) -> None:
        """From the device to where it goes."""
        self.copy(save)
        save.advance(Stage.STAGED)
        if self.neighbours is not None and not save.to_file:  # a file is seen by other hosts as it is
            began = time.monotonic()
            self.neighbours.hand_on(save.slot)
            self._rests(REST_OF_LINKS * (time.monotonic() - began))
        if save.to_file:
            written, given_up = partial(save.advance, Stage.WRITTEN), lambda: save.given_up
            self._files.submit(self.writer.write, save.slot.staged(), written, given_up).result()
        save.advance(Stage.DONE)

    def copy(self, save: Save) -> None:
        """Into its slot."""
        save.copy()


def _behind_the_steps() -> None:
    """Let this thread yield to others, where the system can tell threads apart: files have time, unlike copies."""
    with suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
