"""Ready callbacks train like one device by hand under every layout, and go on under any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import phalanx
from phalanx import EMA, EarlyStopping, Engine, Freeze, Layout, WrongUse
from phalanx.train.restoring import Restorer
from tests.checkpoints import checkpointing, manager_at
from tests.parity import TOLERANCE, HostileLanguage, Sentences, Trace, difference, reference, spread_run
from tests.ranks import Ranks
from tests.tasks import Digits

DECAY = 0.7
LAYOUTS = [
    "dp=1", "dp=2", "fsdp=2", "fsdp=2,zero=1,micro_batch=3", "tp=2,recompute=full", "pp=2", "cp=2",
    "pp=2,schedule=zb,micro_batch=8", "dp=2,exact=8",
]  # fmt: skip
FIRST, LATER = ("blocks.0.*", "embedding.*", "rare"), ("blocks.1.feed*", "*scalar")


def trains(step: int, name: str) -> bool:
    """What `Frozen` says, by hand."""
    frozen = FIRST if step < 2 else LATER
    return not any(fnmatchcase(name, pattern) for pattern in frozen)


@dataclass
class Frozen(HostileLanguage):
    """The first block and all before it are trained later, parts of the second no more."""

    steps: int = 4
    clip: float = 0.02
    weight_decay: float = 0.5
    heads: int = 4
    kv_heads: int = 2

    def callbacks(self) -> list[phalanx.Callback]:
        return [Freeze(FIRST, until=2), EMA(decay=DECAY), Freeze(LATER, since=2)]


def off(found: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    assert found.keys() == want.keys()
    return max(float((found[name].view(want[name].shape) - value).abs().max()) for name, value in want.items())


@pytest.fixture(scope="module")
def by_hand() -> Trace:
    return reference(Frozen(), trains=trains, decay=DECAY)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_frozen_and_averaged_weights_are_those_of_one_device(ranks: Ranks, layout: str, by_hand: Trace) -> None:
    for found in ranks(Layout.parse(layout).world, spread_run, Frozen(), Layout.parse(layout)):
        error, where = difference(found, by_hand)
        assert error < TOLERANCE, where
        assert off(found.averages, by_hand.averages) < TOLERANCE
        for step, gradients in enumerate(found.gradients):
            assert all(gradients[name] is None for name in gradients if not trains(step, name))
    moved = off(by_hand.averages, {name: by_hand.weights[0][name] for name in by_hand.averages})
    assert moved > 1e-3, "an average that is the weight itself would show nothing"


def partly(task: phalanx.Task, layout: str, to: Path, start: Path | None, steps: int) -> dict[str, Tensor]:
    """Some steps from a state, saved; the averages."""
    with Engine(task, Layout.parse(layout), device="cpu") as engine:
        if start is not None:
            assert Restorer(engine, manager_at(start)).restore() is not None
        for batch in islice(engine.batches(), steps):
            engine.step(batch)
        with checkpointing(engine, to) as checkpointer:
            checkpointer.save_now()
        (tensors,) = engine.callbacks.tensors().values()
        return {name: whole.clone() for name, whole in engine.spread.whole.state(tensors) if name in tensors}


@pytest.mark.parametrize(
    ("first", "then"), [("fsdp=2", "dp=1"), ("dp=1", "fsdp=2"), ("tp=2", "fsdp=2"), ("pp=2", "tp=2")]
)
def test_averages_go_on_under_another_layout(
    ranks: Ranks, tmp_path: Path, first: str, then: str, by_hand: Trace
) -> None:
    ranks(Layout.parse(first).world, partly, Frozen(), first, tmp_path / "a", None, 3)
    for found in ranks(Layout.parse(then).world, partly, Frozen(), then, tmp_path / "b", tmp_path / "a", 1):
        assert off(found, {name: by_hand.averages[name] for name in found}) < TOLERANCE


@dataclass
class Averaged(Digits):
    precision: phalanx.task.Precision = "float64"
    learning_rate: float = 0.3

    def callbacks(self) -> list[phalanx.Callback]:
        return [EMA(decay=0.5, evaluate=True)]


@dataclass
class AveragedLanguage(HostileLanguage):
    heads: int = 4
    kv_heads: int = 2

    def held_out(self) -> Any:
        return Sentences(13)

    def callbacks(self) -> list[phalanx.Callback]:
        return [EMA(decay=0.5, evaluate=True)]


def measured(task: phalanx.Task, layout: str) -> tuple[dict[str, float], dict[str, float], bool]:
    """With the averages; with weights that are the averages; and whether the weights stayed what they were."""
    with Engine(task, Layout.parse(layout), device="cpu") as engine:
        for batch in engine.batches():
            engine.step(batch)
        before = {name: weight.clone() for name, weight in engine.whole_weights().items()}
        found = engine.evaluate()
        after = engine.whole_weights()
        (ema,) = engine.callbacks.tasks
        assert isinstance(ema, EMA)
        for name, average in ema.averages.items():
            engine.spread.weights[name].shard.data.copy_(average)
        engine.spread.updated()
        ema.evaluate = False
        return found, engine.evaluate(), all(torch.equal(after[name], weight) for name, weight in before.items())


@pytest.mark.parametrize(
    ("task", "layouts"),
    [(Averaged(), ("dp=2", "fsdp=2,zero=1")), (AveragedLanguage(), ("fsdp=2", "tp=2", "pp=2"))],
    ids=["digits", "language"],
)
def test_evaluations_are_made_with_the_average_and_the_weights_come_back(
    ranks: Ranks, task: phalanx.Task, layouts: Sequence[str]
) -> None:
    ((want, same, kept),) = ranks(1, measured, task, "dp=1")
    assert want == same
    assert kept
    for layout in layouts:
        for found, same, kept in ranks(2, measured, task, layout):
            assert kept, layout
            assert found == same, layout
            assert abs(found["loss"] - want["loss"]) < TOLERANCE


class Told:
    """As much of an engine as early stopping speaks to."""

    why = ""

    def stop(self, why: str) -> None:
        self.why = why


def stopped_at(callback: EarlyStopping, values: list[float]) -> int | None:
    for number, value in enumerate(values):
        engine: Any = Told()
        callback.on_evaluation(engine, {"score": value})
        if engine.why:
            return number
    return None


def test_early_stopping_counts_what_did_not_improve() -> None:
    nan = float("nan")
    assert stopped_at(EarlyStopping("score", patience=2), [3, 2, 2.5, 1, 1, 1.5]) == 5
    assert stopped_at(EarlyStopping("score", patience=2), [3, 2, 2.5, 1, 1, 0.5]) is None
    assert stopped_at(EarlyStopping("score", patience=2, min_delta=0.4), [3, 2.7, 2.65, 2]) == 2
    assert stopped_at(EarlyStopping("score", patience=1, mode="max"), [1, 2, 3, 2]) == 3
    assert stopped_at(EarlyStopping("score", patience=2), [nan, nan]) == 1
    first = EarlyStopping("score", patience=2)
    assert stopped_at(first, [1, 2]) is None
    again = EarlyStopping("score", patience=2)
    again.load_state_dict(first.state_dict())
    assert stopped_at(again, [1]) == 0, "it goes on with what it has seen"
    with pytest.raises(WrongUse, match="did you mean 'score'"):
        EarlyStopping("scores").on_evaluation(Told(), {"score": 1.0})  # type: ignore[arg-type]


@dataclass
class Mistaken(Digits):
    freeze: Any = ()
    which: str = ""

    def callbacks(self) -> list[phalanx.Callback]:
        if self.which:
            return [EarlyStopping(patience=1)]
        return [Freeze(*each) for each in self.freeze]


def test_what_cannot_work_is_refused() -> None:
    for make, words in (
        (lambda: EMA(decay=1.0), "averages nothing"),
        (lambda: EarlyStopping(patience=0), "patience of 1 or more"),
        (lambda: EarlyStopping(mode="least"), 'Use mode="min"'),
        (lambda: EarlyStopping(min_delta=-1), "from 0 up"),
        (lambda: Freeze("a", until=0), "freezes nothing"),
        (lambda: Freeze("a", 3, 3), "freezes nothing"),
        (lambda: Engine(Mistaken(freeze=[("layer.*", 2)]), device="cpu"), r"Freeze\('layer.\*'\) matches no weight"),
        (lambda: Engine(Mistaken(freeze=[("*", 2)]), device="cpu"), "step 1 would train no weight"),
        (lambda: Engine(Mistaken(freeze=[("0.*", 4), ("2.*", 5, 3)]), device="cpu"), "step 4 would train no weight"),
    ):
        with pytest.raises(WrongUse, match=words):
            make()


def test_early_stopping_needs_evaluations() -> None:
    with Engine(Mistaken(which="early"), device="cpu") as engine:
        with pytest.raises(WrongUse, match="evaluate_every is 0"):
            engine.callbacks.call("on_start", engine)
        engine.task = replace(engine.task, evaluate_every=2)
        engine.callbacks.call("on_start", engine)
        engine.held_out = None
        with pytest.raises(WrongUse, match=r"Give it a held_out\(\)"):
            engine.callbacks.call("on_start", engine)
