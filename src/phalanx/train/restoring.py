"""Finding a run's newest whole state again: in this host's memory, in a neighbour's, or in files.

Memory is newer than files, and fast. Where a host was lost, what others still have of its state goes to a file first
(`rescue`). A damaged file is named and passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from phalanx.checkpoint.fitting import check_fits
from phalanx.checkpoint.manager import Checkpoint, CheckpointManager
from phalanx.checkpoint.manifest import Chunk, Damaged, Held, Manifest
from phalanx.checkpoint.owed import COMM
from phalanx.checkpoint.read import read
from phalanx.checkpoint.sites import sites_missing
from phalanx.checkpoint.slot import Slot, Staged
from phalanx.checkpoint.state import State
from phalanx.checkpoint.store import open_store
from phalanx.checkpoint.verify import check_committed
from phalanx.errors import CannotHere, WrongUse
from phalanx.events import say
from phalanx.parallel.weights.boxes import Box
from phalanx.train.engine import Engine
from phalanx.train.rescue import Moment, Rescue, coverage, joined, moment_of, once


def load(engine: Engine, folder: str | Path) -> int:
    """Take up the newest whole checkpoint in a folder, or under a URL; its step. All ranks must call it."""
    if Restorer(engine, CheckpointManager(open_store(folder))).restore() is None:
        raise WrongUse(
            f"{folder} holds no checkpoint to go on from. Check the path; a run's checkpoints are in its checkpoints "
            "folder, and phalanx.save writes others."
        )
    return engine.step_number


def steps_seen(engine: Engine, manager: CheckpointManager) -> list[int]:
    """The checkpoints that rank 0 sees: another rank might look a moment later. All ranks must ask."""
    return [int(step) for step in engine.mesh.world.broadcast_words([str(step) for step in manager.steps()], 0)]


def done_again(step: int, reached: int) -> str:
    """Why steps come a second time, where a run that had done so many goes on after this one; else nothing."""
    if reached <= step:
        return ""
    again = f"step {step + 1}" if reached == step + 1 else f"steps {step + 1} to {reached}"
    were = "was done" if reached == step + 1 else "were done"
    kept = f"the newest state that is whole is of step {step}" if step else "no state was whole yet: from the beginning"
    return f"  again  {again} {were} and not kept, {kept}; the same samples come again"


class Restorer:
    """A rank's way back. All ranks take the same one."""

    def __init__(
        self,
        engine: Engine,
        manager: CheckpointManager,
        slots: Sequence[Slot] = (),
        own: Sequence[Slot] | None = None,
        *,
        generation: int = 0,
        note: Callable[..., None] | None = None,
    ) -> None:
        """``slots``: all that this host has, its own ranks' and those it keeps for a neighbour.

        ``own``: those of them that this rank writes to, if not all.
        """
        self.engine, self.manager, self.slots, self.generation = engine, manager, slots, generation
        self.own = slots if own is None else own
        self.note = note or (lambda kind, **fields: None)
        beside, left_out = engine.callbacks.tensors(), engine.frozen.names
        self.state = State(engine.spread, engine.optimizer, engine.environment.hosts, beside, left_out)

    def restore(self) -> str | None:
        """Take up the newest whole state and say where it was; None if there is none."""
        steps = steps_seen(self.engine, self.manager)
        newest_file = max(steps, default=-1)
        held = self._in_memory()
        moment = self._newest_on_every_host(held)
        if moment is not None and moment[1] >= newest_file:
            self._from_memory(held[moment])
            self._void_all_but(moment)
            return "memory"
        rescued = None
        if len(set(self.engine.environment.hosts)) > 1:
            rescued = Rescue(self.engine, self.manager, self.generation, held).write(newest_file, self._needed)
            if rescued is not None:
                self.note("checkpoint", step=rescued, rescued=True)
        if rescued is not None:
            steps = [*steps, rescued]
        damaged: list[str] = []
        passed_over: list[int] = []
        for step in reversed(steps):
            damage = self._from_file(step)
            if damage is None:
                self._set_aside(passed_over)
                self._void_all_but(None)
                return f"{self.manager.store.url}/{self.manager.name(step)}"
            damaged.append(damage)
            passed_over.append(step)
            self.note("damaged", step=step, reason=damage)
            if self.engine.environment.rank == 0:
                say(f"damaged  {damage}; going back to the checkpoint before it")
        if damaged:
            raise CannotHere(
                f"none of the {len(steps)} checkpoints in {self.manager.store.url} is whole: {damaged[0]}. "
                "phalanx verify tells all; restore one from a copy, or start again in another folder."
            )
        return None

    def _set_aside(self, steps: Sequence[int]) -> None:
        """Damaged checkpoints out of the way: their steps will be done and saved again."""
        for step in steps if self.engine.environment.rank == 0 else ():
            try:
                name = self.manager.set_aside(step)
                say(f"damaged  it is {self.manager.store.url}/{name} now, for you to look at or remove")
            except OSError as error:
                say(f"damaged  it cannot be put aside either ({error.strerror}), and is left alone")

    def _void_all_but(self, moment: Moment | None) -> None:
        """Copies of other moments lead nowhere: the run goes on from this one, and must not lose it to make room."""
        self._everybodys([])  # nobody looks into them any more
        for slot in self.own:
            if slot.step() is not None and moment_of(slot.staged()) != moment:
                slot.void()

    def _everybodys(self, words: list[str]) -> list[list[str]]:
        return self.engine.mesh.world.all_gather_words(words)

    # Memory of this host.

    def _in_memory(self) -> dict[Moment, list[Staged]]:
        """All whole copies on this host, by moment."""
        held: dict[Moment, list[Staged]] = {}
        for slot in self.slots:
            if slot.step() is not None:
                staged = slot.staged()
                held.setdefault(moment_of(staged), []).append(staged)
        return held

    def _newest_on_every_host(self, held: Mapping[Moment, list[Staged]]) -> Moment | None:
        """The newest moment of which each rank finds all that it needs on its own host."""
        whole = [f"{generation} {step}" for (generation, step), found in held.items() if self._enough(found)]
        common = set.intersection(*(set(words) for words in self._everybodys(whole)))
        moments = [(int(generation), int(step)) for generation, step in map(str.split, common)]
        return max(moments, default=None)

    def _enough(self, found: list[Staged]) -> bool:
        """Whether these copies together hold all tensors whole; what is owed of gradients is each rank's own.

        Under the same layout a rank that finds its own copy has what it owes. Under another all that is owed is shared
        out: then all of it must be on one host.
        """
        whole, parts = coverage(found)
        if not self._needed() <= whole:
            return False
        engine, owed = self.engine, {name for name in whole | parts if name.startswith(COMM)}
        if not owed or len({*engine.environment.hosts}) == 1:
            return not parts
        own = [staged for staged in found if staged.facts["rank"] == engine.environment.rank]
        return parts <= owed and any(staged.facts["layout"] == str(engine.layout) for staged in own)

    def _needed(self) -> set[str]:
        """What no state is without."""
        weights, left_out = self.engine.spread.weights.items(), self.engine.frozen.names
        return {f"model/{name}" for name, weight in weights if weight.shard.numel() and name not in left_out}

    def _from_memory(self, found: list[Staged]) -> None:
        tensors: dict[str, Held] = {}
        views: dict[tuple[str, Box], Tensor] = {}
        facts, numbers = joined(found)
        for place, view in once(found):
            held = tensors.setdefault(place.name, Held(place.dtype, place.shape))
            held.chunks.append(Chunk(place.name, place.box, "", 0, 0, 0))
            views[place.name, place.box] = view
        manifest = Manifest(facts, tensors, numbers)
        read(tensors, lambda chunk: views[chunk.tensor, chunk.box], self.state.wanted(manifest))
        self.engine.frozen.take_up_memory(self.state, manifest)
        self._resume(manifest)

    def _resume(self, manifest: Manifest) -> None:
        """Its tensors are in place."""
        self.engine.resume(manifest.facts | {"sites_missing": sites_missing(manifest)})

    # Files.

    def _check_own(self, checkpoint: Checkpoint) -> None:
        """Refuse what another run has left here."""
        if self.engine.run is not None:
            check_committed(self.engine.run, checkpoint)
        if checkpoint.caution:
            say(f"   note  {checkpoint.caution}")

    def _from_file(self, step: int) -> str | None:
        """What is wrong with a checkpoint, in the words of the first rank that cannot read it; None: it was read."""
        damage = ""
        try:
            checkpoint = self.manager.open(step)
            checkpoint.manifest.check_facts(checkpoint.where)
            if self.engine.is_main:
                self._check_own(checkpoint)
            check_fits(self.state, checkpoint.manifest)
            checkpoint.read(self.state.wanted(checkpoint.manifest))
        except (Damaged, OSError) as error:
            damage = str(error)
        found = next((words[0] for words in self._everybodys([damage]) if words[0]), None)
        if found is None:
            self.engine.frozen.take_up(self.state, checkpoint.manifest)
            self._resume(checkpoint.manifest)
        return found
