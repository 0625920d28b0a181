"""A run interrupted half way: its state saved as training saves it, and taken up again by an engine that has none.

Thoroughly, that is an engine made anew; and a step before the half the state is staged in memory too, while the next
step runs. Whether a task hides state where nobody looks, and whether copies are awaited, depends on no layout: it is
enough to be thorough once. Otherwise the engine is emptied, which takes a tenth of the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

from phalanx.checkpoint.manager import Checkpoint, CheckpointManager
from phalanx.checkpoint.slot import Slot
from phalanx.checkpoint.state import State
from phalanx.checkpoint.store import Folder
from phalanx.checkpoint.write import Piece, write_part
from phalanx.parallel.weights.boxes import Box
from phalanx.prove.ladder import Difference, Standard
from phalanx.prove.ranks.restored import KEPT, READ, RESUMED, WRITTEN, likeness
from phalanx.prove.ranks.witness import Held, Witness, checksum
from phalanx.prove.reference.hostile import Hostile
from phalanx.task import Task
from phalanx.train.checkpointing import Checkpointer
from phalanx.train.engine import Engine
from phalanx.train.guard import Guard
from phalanx.train.policy import Policy
from phalanx.train.restoring import Restorer
from phalanx.train.scale import LossScale

FACTS = ("step", "samples", "terms", "scale", "guard", "options", "attributes", "callbacks")
"""What a resumed run must know again, beside its tensors."""
CALLED = {
    "step": "step number", "scale": "loss scale", "options": "optimizer's options",
    "attributes": "optimizer's attributes", "guard": "guard's memory", "callbacks": "callbacks' state",
}  # fmt: skip


@dataclass(frozen=True)
class Resume:
    """Where an interrupted run keeps its state."""

    folder: str
    elsewhere: str
    """A folder with a checkpoint of the same moment, written under another layout."""
    thorough: bool


@dataclass(frozen=True)
class Noted:
    """What a rank held at one moment: checksums by rung and name, and facts."""

    bits: dict[tuple[str, str], int | None]
    facts: dict[str, Any]
    beside: dict[str, int]
    """Of what callbacks keep for each weight."""

    @classmethod
    def of(cls, witness: Witness, step: int) -> Noted:
        bits = {(rung, name): _bits(value) for rung, name, value, _ in witness.held(step)}
        facts = witness.engine.facts()
        return cls(bits, {name: facts[name] for name in FACTS}, _beside(witness.engine))


def _beside(engine: Engine) -> dict[str, int]:
    every = engine.callbacks.tensors().items()
    return {f"{label} of {name}": checksum(tensor) for label, tensors in every for name, tensor in tensors.items()}


def _bits(value: Tensor | None) -> int | None:
    return None if value is None else checksum(value)


class Interruption:
    """One rank's: saves, and then holds what is restored against what was saved."""

    def __init__(self, resume: Resume, witness: Witness, half: int, slots: Sequence[Sequence[Slot]]) -> None:
        """``slots``: by rank, in memory that all of them see."""
        self.resume, self.witness, self.half, self.slots = resume, witness, half, slots
        engine = witness.engine
        self.manager = CheckpointManager(Folder(resume.folder))
        self.own = slots[engine.environment.rank]
        for slot in self.own:
            slot.void()
        self.checkpointer = Checkpointer(engine, self.manager, Policy(minutes=0), slots=self.own)
        self.noted: dict[int, Noted] = {}

    def after_step(self) -> bool:
        """Save what is due; True if the run is to be interrupted now."""
        engine = self.witness.engine
        done, local = engine.step_number, engine.layout.local
        if done == self.half - (1 if local is None else local.every) and self.resume.thorough:
            self.noted[done] = Noted.of(self.witness, done - 1)
            self.checkpointer.stage(save=False)
        if done < self.half:
            return False
        self.noted[done] = Noted.of(self.witness, done - 1)
        self.checkpointer.save_now()
        self.checkpointer.close()
        for slot in self.own if len(self.noted) > 1 else ():
            if slot.step() == done:
                slot.void()  # so that what was staged while a step ran is the newest in memory
        return True

    def go_on(self, engine: Engine) -> None:
        """Restore an engine that has no state, from wherever one can be had; at last from its own checkpoint."""
        witness = self.witness
        if engine is not witness.engine:
            witness.watch(engine)
        in_memory = list(self._memory()) if len(self.noted) > 1 else []
        checkpoint = CheckpointManager(Folder(self.resume.elsewhere)).open(self.half)
        checkpoint.read(State(engine.spread, engine.optimizer).wanted(checkpoint.manifest))
        engine.resume(checkpoint.manifest.facts)
        witness.told.differences += self._elsewhere()
        emptied(engine)
        took = Restorer(engine, self.manager).restore()
        assert took is not None
        fault = partial(self._fault, self.manager.open(self.half))
        in_file = list(self._changes(self.noted[self.half], "", fault))
        witness.told.differences += in_file or in_memory
        witness.went_on()

    def _memory(self) -> Iterator[Difference]:
        engine = self.witness.engine
        every = [slot for slots in self.slots[: engine.environment.world] for slot in slots]
        took = Restorer(engine, CheckpointManager(Folder(f"{self.resume.folder}/none")), every).restore()
        assert took == "memory"
        yield from self._changes(self.noted[min(self.noted)], "in memory", lambda held: KEPT)

    def close(self) -> None:
        self.checkpointer.close()

    def _changes(self, noted: Noted, where: str, fault: Callable[[Held], str]) -> Iterator[Difference]:
        """What is not to the last bit what was noted."""
        engine, step = self.witness.engine, noted.facts["step"] - 1
        facts = engine.facts()
        for name in FACTS:
            if facts[name] != noted.facts[name]:
                called = CALLED.get(name, name)
                words = f"the {called} was not restored: it is {facts[name]}, and was {noted.facts[name]} when saved"
                yield self._difference("resume", called, math.inf, words, RESUMED)
        beside = _beside(engine)
        for name, bits in noted.beside.items():
            if beside.get(name) != bits:
                yield self._difference("resume", name, math.inf, f"the {name} was not restored", RESUMED)
        for held in self.witness.held(max(step, 0)):
            rung, name, value, _ = held
            if (rung, name) in noted.bits and _bits(value) != noted.bits[rung, name]:
                words = self._words(held, step)
                error = self.witness.standard.error(step, *held) or math.inf
                words = f"{where}: {words}" if where else words
                yield self._difference("resume", saved_name(rung, name), error, words, fault(held))

    def _elsewhere(self) -> Iterator[Difference]:
        """What another layout's checkpoint gave, against one device."""
        witness, step = self.witness, self.half - 1
        for name, found, want in self._counted(step):
            if not math.isclose(found, want, rel_tol=1e-9):
                words = f"the {name} of the checkpoint is {found:g}, not {want:g}"
                yield self._difference("resume elsewhere", name, math.inf, words, RESUMED)
        for held in witness.held(step):
            rung, name, _, _ = held
            error = witness.standard.error(step, *held)
            if error > witness.standard.limit(step, rung):
                yield self._difference("resume elsewhere", saved_name(rung, name), error, self._words(held, step), READ)

    def _counted(self, step: int) -> list[tuple[str, float, float]]:
        engine, done = self.witness.engine, self.witness.standard.steps[: step + 1]
        return [
            ("step", engine.step_number, len(done)),
            ("samples", engine.samples, sum(len(s.ids) for s in done)),
            ("terms", engine.terms, sum(s.terms for s in done)),
        ]

    def _difference(self, rung: str, name: str, error: float, words: str, fault: str) -> Difference:
        return Difference(self.half - 1, rung, name, error, self.witness.told.rank, words, fault)

    def _words(self, held: Held, step: int) -> str:
        rung, name, value, part = held
        weight = self.witness.weights.get(name.split(" ")[0])
        holding = self.witness.holding
        cut, index = (None, 0) if weight is None else (holding.cut(weight.name), holding.index(weight.name))
        words = likeness(self.witness.standard, step, rung, name, value, part, weight, cut, index)
        return f"{saved_name(rung, name)} {words}"

    def _fault(self, saved: Checkpoint, held: Held) -> str:
        """Whether what is in the file is wrong already."""
        rung, name, _, _ = held
        if rung == "weights in use":
            return RESUMED
        in_file, step = file_name(rung, name, saved), self.half - 1
        whole = saved.tensor(in_file) if in_file else None
        right = self.witness.standard.error(step, rung, name, whole) <= self.witness.standard.limit(step, rung)
        return READ if right else WRITTEN


def emptied(engine: Engine) -> Engine:
    """The same engine, as if it had just been made, with nothing in the weights that a checkpoint holds."""
    for weight in (one for name, one in engine.spread.weights.items() if name not in engine.frozen.names):
        for tensor in (weight.shard, weight.full) if weight.storage.always_whole else (weight.shard,):
            _empty(tensor)
    for _, buffer in engine.spread.whole.replicated():
        _empty(buffer)
    outer = engine.spread.outer
    for kept in (*outer.agreed.values(), *outer.velocity.values()) if outer is not None else ():
        _empty(kept)
    for bucket in engine.spread.buckets:
        for owed in bucket.coded.all_owed() if bucket.coded is not None else ():
            _empty(owed.now)
    engine.optimizer.state.clear()
    for tensors in engine.callbacks.tensors().values():
        tensors.clear()
    engine.step_number, engine.samples, engine.terms, engine.compared = 0, 0, 0.0, None
    engine.loss_scale, engine.guard = LossScale(engine.loss_scale.dynamic), Guard()
    return engine


def _empty(tensor: Tensor) -> None:
    tensor.data.fill_(math.nan if tensor.is_floating_point() else 0)


def saved_name(rung: str, name: str) -> str:
    """What is wrong, as a finding calls it."""
    if rung == "moments":
        weight, _, moment = name.rpartition(" ")
        return f"{moment} of {weight}"
    return f"{name} in use" if rung == "weights in use" else name


def file_name(rung: str, name: str, saved: Checkpoint) -> str:
    """What a checkpoint calls it; empty if it does not have it."""
    weight, _, moment = name.rpartition(" ")
    names = [f"{kind}/{moment}/{weight}" for kind in ("optimizer", "counters")] if rung == "moments" else []
    return next((n for n in names or [f"model/{name}"] if n in saved.manifest.tensors), "")


def write_reference(task: Task, standard: Standard, folder: str, half: int = 0, sites: Sequence[Standard] = ()) -> None:
    """One device's checkpoint at the half, from what the reference had, by nothing but the format's own words.

    ``half``: that step, if it is not the trial's. ``sites``: of each what one device had as that site.
    """
    assert isinstance(task, Hostile)
    half = half or task.proof_trial.half
    done = standard.steps[:half]
    facts = {
        "step": half, "samples": sum(len(s.ids) for s in done), "terms": sum(s.terms for s in done),
        "scale": [1.0, 0, True], "guard": Guard().state(), "compared": None, "options": {}, "attributes": {},
        "seed": task.seed, "global_batch": task.global_batch, "data": task.proof_trial.size,
        "order": task.proof_order.facts(),
    }  # fmt: skip
    manager, unfinished = CheckpointManager(Folder(folder)), CheckpointManager(Folder(folder)).commits.writing(0, half)
    manager.fence(0)
    pieces = chain.from_iterable(_of_site(one, half - 1, number) for number, one in enumerate(sites))
    write_part(manager.store, unfinished, 0, pieces if sites else _pieces(standard, half - 1), facts, {})
    manager.commit(0, half, 1, 60.0, lambda: False)


def _pieces(standard: Standard, step: int) -> Iterator[Piece]:
    last = standard.steps[step]
    for name, value in (last.weights | last.buffers).items():
        if name in standard.saved:
            yield f"model/{name}", Box.whole(value), tuple(value.shape), value
    for name, moments in last.moments.items():
        for key, value in moments.items():
            kind = "optimizer" if value.ndim or value.shape == last.weights[name].shape else "counters"
            yield f"{kind}/{key}/{name}", Box.whole(value), tuple(value.shape), value


def _of_site(standard: Standard, step: int, site: int) -> Iterator[Piece]:
    """What a site has of its own; the first says what all have agreed on."""
    last = standard.steps[step]
    agreed, velocity = last.agreed or {}, last.velocity or {}
    for name, box, shape, value in _pieces(standard, step):
        weight = name.removeprefix("model/")
        if weight == name or weight in agreed:
            yield f"sites/{site}/{name}", box, shape, value
        if weight != name and not site:
            yield name, box, shape, agreed.get(weight, value)
    for name, value in velocity.items() if not site else ():
        yield f"outer/velocity/{name}", Box.whole(value), tuple(value.shape), value
