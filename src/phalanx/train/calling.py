"""A task's callbacks, and ours, called: in order, with what one of them raises told as its own."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx import schedules
from phalanx.callbacks import Callback, KeepBest, ReduceLROnPlateau
from phalanx.errors import CannotHere, WrongUse
from phalanx.metrics import logged_by, refused
from phalanx.task import Task
from phalanx.train.collecting import CannotSummarise

if TYPE_CHECKING:
    from phalanx.train.engine import Engine


@dataclass(frozen=True)
class Ended:
    """Where a callback has ended a run."""

    step: int
    of: int
    """So many steps were planned."""
    why: str

    @classmethod
    def found(cls, facts: Mapping[str, Any], steps: int) -> Ended | None:
        """What the facts of a state say of it; nothing where more ``steps`` are asked for now than were planned."""
        ended = cls(**facts["ended"]) if facts.get("ended") else None
        return ended if ended is not None and steps <= ended.of else None


HOW = "Return a list of them: return [phalanx.EMA(decay=0.999)]"


def made_callbacks(task: Task) -> list[Callback]:
    """What a task's `callbacks` gives, checked: a list of callbacks."""
    name = f"{type(task).__name__}.callbacks"
    if not callable(task.callbacks):
        raise WrongUse(f"{name} is a {type(task.callbacks).__name__}. Make it a method: def callbacks(self): return []")
    found = task.callbacks()
    own = [*set_up(task)]
    if isinstance(found, Callback):
        raise WrongUse(f"{name} returned one {type(found).__name__} and no list. {HOW}")
    if not isinstance(found, (list, tuple)):
        raise WrongUse(f"{name} returned a {type(found).__name__}, not callbacks. {HOW}")
    for number, each in enumerate(found):
        if isinstance(each, type) and issubclass(each, Callback):
            raise WrongUse(f"{name} has the class {each.__name__} itself. Make one of it: {each.__name__}()")
        if not isinstance(each, Callback):
            raise WrongUse(
                f"{name} has a {type(each).__name__}, which is no callback. Make it a subclass of phalanx.Callback: "
                "class Mine(phalanx.Callback)"
            )
        _check_methods(each, name)
        if any(each is other for other in found[:number]):
            raise WrongUse(f"{name} has the same {type(each).__name__} twice. Make two of them, or leave one out.")
    made = [*found, *own]
    best = [each for each in made if isinstance(each, KeepBest)]
    if len(best) > 1:
        raise WrongUse(f"{name} and keep_best have {len(best)} KeepBest, and one checkpoint is the best. Keep one.")
    return made


def set_up(task: Task) -> Iterator[Callback]:
    """The callbacks that fields of a task ask for: ``keep_best``, and ``rate=plateau``."""
    if task.keep_best:
        yield KeepBest.of(task.keep_best)
    name, options = schedules.parsed(task.rate)
    if name == "plateau":
        watcher = ReduceLROnPlateau(
            str(options["measure"]), float(options["factor"]), int(options["patience"]), float(options["min_delta"]),
            cooldown=int(options["cooldown"]), end=float(options["end"]),
        )  # fmt: skip
        watcher.field = f"rate={task.rate}"
        yield watcher


def _check_methods(callback: Callback, name: str) -> None:
    """Refuse a method that nobody calls for a letter, and a state that is never taken up."""
    kind, known = type(callback), [method for method in vars(Callback) if not method.startswith("_")]
    for method, value in vars(kind).items():
        near = difflib.get_close_matches(method, known, n=1, cutoff=0.8)
        if callable(value) and near and method not in known and method.startswith(("on_", "before_", "load_")):
            raise WrongUse(f"{name} has a {kind.__name__} whose {method} nothing calls. Call it {near[0]}.")
    saves, loads = (getattr(kind, each) is not getattr(Callback, each) for each in ("state_dict", "load_state_dict"))
    if saves != loads:
        has, lacks = ("state_dict", "load_state_dict") if saves else ("load_state_dict", "state_dict")
        raise WrongUse(
            f"{name} has a {kind.__name__} with {has} and without {lacks}: a resumed run would not go on as it was. "
            f"Give it a {lacks}."
        )


def labelled(callbacks: list[Callback]) -> dict[str, Callback]:
    """By what they are saved as: the name of their class, with a number from the second of it on."""
    found: dict[str, Callback] = {}
    for each in callbacks:
        kind = type(each).__name__
        count = sum(type(other).__name__ == kind for other in found.values())
        label = f"{kind}-{count + 1}" if count else kind
        if label.lower() in {"model", *(other.lower() for other in found)}:
            raise WrongUse(
                f"a callback's class is called {kind}, and its file would be another's. Give it another name."
            )
        found[label] = each
    return found


class Callbacks:
    """All that are called for an engine: ours first, which wait for what must not change any more."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.named = labelled(made_callbacks(task))
        """The task's, in their order."""
        self._ours: list[Callback] = []
        self._refuses_log = refused("a callback")
        self.during: Callable[[str], AbstractContextManager[None]] = lambda phase: nullcontext()
        """Told that the task's callbacks are called, while they are."""

    @property
    def tasks(self) -> list[Callback]:
        return list(self.named.values())

    @property
    def all(self) -> list[Callback]:
        """As they are called."""
        return [*self._ours, *self.tasks]

    def add(self, callback: Callback) -> None:
        """Have one of ours called too."""
        self._ours.append(callback)

    def remove(self, callback: Callback) -> None:
        if callback in self._ours:
            self._ours.remove(callback)

    def call(self, method: str, *given: Any) -> None:
        """Call a method of each."""
        for callback in self._ours:
            getattr(callback, method)(*given)
        for callback in self.tasks:
            with self.during("callbacks"), self._named(callback, method):
                getattr(callback, method)(*given)

    @contextmanager
    def _named(self, callback: Callback, method: str) -> Iterator[None]:
        """What is raised meanwhile is told with the callback's name."""
        try:
            with logged_by(self._refuses_log):
                yield
        except (WrongUse, CannotHere):
            raise
        except Exception as error:
            error.add_note(f"{type(callback).__name__}.{method}, a callback of {type(self.task).__name__}, raised this")
            raise

    @property
    def watches_evaluations(self) -> bool:
        return any(type(each).on_evaluation is not Callback.on_evaluation for each in self.tasks)

    # Their state.

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Those that are kept beside the weights, by callback and weight."""
        found = {label: each.tensors() for label, each in self.named.items()}
        return {label: tensors for label, tensors in found.items() if tensors is not None}

    def state(self) -> dict[str, Any]:
        """What they go on with beside that, by callback."""
        found = {}
        for label, callback in self.named.items():
            with self._named(callback, "state_dict"):
                state = callback.state_dict()
            try:
                # as it is now, whatever the callback goes on to do with it
                found[label] = json.loads(json.dumps(state))
                _check_keys(state)
            except (TypeError, ValueError) as error:
                raise WrongUse(
                    f"{type(callback).__name__}.state_dict has what cannot be saved ({error}). Return numbers, text, "
                    "lists, dicts with text as keys (str(3)); tensors in the shape of weights go into tensors()."
                ) from error
        return found

    def restore(self, state: dict[str, Any]) -> None:
        """Have each take up what it had."""
        for label, callback in self.named.items():
            if label in state:
                with self._named(callback, "load_state_dict"):
                    callback.load_state_dict(state[label])

    # The weights of an evaluation.

    @contextmanager
    def evaluating(self, engine: Engine) -> Iterator[None]:
        """Meanwhile the model computes with what a callback has for evaluations, if one has."""
        found = self._beside()
        if len(found) > 1:
            raise WrongUse(
                f"{len(found)} callbacks of {type(self.task).__name__} want evaluations to be made with weights of "
                "theirs. Let one of them do so."
            )
        if not found:
            yield
            return
        (beside,) = found.values()
        self.await_copy(engine)
        _exchange(engine, beside)
        engine.spread.updated()
        try:
            yield
        except BaseException as error:
            _exchange(engine, beside)
            engine.spread.stale = True
            if isinstance(error, CannotSummarise) or engine.mesh.world.alone:
                engine.spread.refresh()  # else it may be of one rank, and the others would be waited for
            raise
        _exchange(engine, beside)
        engine.spread.updated()

    def _beside(self) -> dict[str, Mapping[str, Tensor]]:
        every = {label: each.evaluates_with() for label, each in self.named.items()}
        return {label: tensors for label, tensors in every.items() if tensors}

    def evaluating_with(self, engine: Engine) -> str:
        """The callback whose weights evaluations are made with, or nothing; a rank may have none of these weights."""
        if all(type(each).evaluates_with is Callback.evaluates_with for each in self.tasks):
            return ""
        every = engine.mesh.world.all_gather_words(list(self._beside()))
        return ", ".join(dict.fromkeys(name for names in every for name in names))

    def rate_factor(self) -> float:
        """What all learning rates are multiplied by."""
        return math.prod(each.rate_factor() for each in self.tasks)

    @property
    def keeps_best(self) -> KeepBest | None:
        """The one that says which checkpoint is the best, if there is one."""
        return next((each for each in self.tasks if isinstance(each, KeepBest)), None)

    def evaluated(self, engine: Engine, measures: Mapping[str, float]) -> None:
        """All held-out data was: they may change what they keep."""
        if self.watches_evaluations:
            self.await_copy(engine)
        self.call("on_evaluation", engine, measures)

    def await_copy(self, engine: Engine) -> None:
        """Before anything that is saved is changed: wait for a copy of the state that may be under way."""
        for callback in self._ours:
            callback.before_update(engine)


@torch.no_grad()
def _exchange(engine: Engine, beside: Mapping[str, Tensor]) -> None:
    """Put these into the place of the rows that this rank owns and of buffers, and those into theirs."""
    buffers = dict(engine.spread.whole.replicated())
    for name, tensor in beside.items():
        shard = engine.spread.weights[name].shard.detach() if name in engine.spread.weights else buffers[name]
        kept = shard.clone()
        shard.copy_(tensor)
        tensor.copy_(kept)


def _check_keys(state: Any) -> None:
    """Refuse keys that would come back as text."""
    if isinstance(state, dict):
        others = [key for key in state if not isinstance(key, str)]
        if others:
            raise TypeError(f"the key {others[0]!r} would come back as text")
    for inner in state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ():
        _check_keys(inner)
