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
from safetensors.torch import load_file
from torch import Tensor, nn

import phalanx
from phalanx import EMA, EarlyStopping, Engine, Freeze, KeepBest, Layout, ReduceLROnPlateau, WrongUse
from phalanx.callbacks import direction_of
from phalanx.checkpoint.best import Best
from phalanx.checkpoint.verify import verify
from phalanx.train.restoring import Restorer
from tests.checkpoints import checkpointing, manager_at
from tests.parity import TOLERANCE, HostileLanguage, HostileVision, Sentences, Trace, difference, reference, spread_run
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


@dataclass
class AveragedVision(HostileVision):
    buffers: bool = True

    def callbacks(self) -> list[phalanx.Callback]:
        return [EMA(decay=DECAY, buffers=self.buffers)]


class Noted(phalanx.Callback):
    """The whole state after every step, and before the first."""

    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []

    def before_update(self, engine: Engine) -> None:
        if not self.states:
            self.on_step(engine, None)

    def on_step(self, engine: Engine, metrics: Any) -> None:
        self.states.append({name: tensor.clone() for name, tensor in engine.whole_weights().items()})


def averaged(task: AveragedVision, layout: str, to: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the callback has, half way through another engine; and what it should be, by hand."""
    noted = Noted()
    with Engine(task, layout, device="cpu") as engine:
        engine.callbacks.add(noted)
        for batch in islice(engine.batches(), 2):
            engine.step(batch)
        with checkpointing(engine, to) as checkpointer:
            checkpointer.save_now()
    with Engine(task, layout, device="cpu") as engine:
        assert Restorer(engine, manager_at(to)).restore() is not None
        engine.callbacks.add(noted)
        for batch in engine.batches():
            engine.step(batch)
        (ema,) = engine.callbacks.tasks
        found = {name: tensor.clone() for name, tensor in engine.whole_weights(ema).items()}
    first, *states = noted.states
    hand = dict(first)
    for state in states:
        for name, value in state.items():
            running = name.endswith(("running_mean", "running_var"))
            moves = value.is_floating_point() and (not running or task.buffers)
            hand[name] = DECAY * hand[name] + (1 - DECAY) * value if moves else value
    return found, hand


@pytest.mark.parametrize("buffers", [True, False])
@pytest.mark.parametrize("layout", ["dp=2", "fsdp=2", "pp=2,micro_batch=8"])
def test_buffers_are_averaged_if_asked(ranks: Ranks, tmp_path: Path, layout: str, buffers: bool) -> None:
    for found, hand in ranks(2, averaged, AveragedVision(buffers=buffers), layout, tmp_path):
        assert off(found, hand) < TOLERANCE
    running = [name for name in hand if name.endswith("running_mean")]
    assert running


class Level(nn.Module):
    """Rises by the learning rate in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1] * 0 + self.level


@dataclass
class Hill(Digits):
    """A score that is best where the weights are at ``top``, after so many steps."""

    steps: int = 8
    top: float = 4.0
    evaluate_every: int = 1
    learning_rate: float = 1.0
    warmup_steps: int = 0
    rate: str = "constant"
    clip: float = float("inf")
    patience: int = 0
    average: bool = False

    def model(self) -> nn.Module:
        return Level()

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.learning_rate)

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        return phalanx.Loss(-output.sum(), len(output))

    def evaluate(self, output: Tensor, batch: dict[str, Any]) -> Any:
        away = (output[:, 0] - self.top).square().sum()
        return {"score": phalanx.Loss(-away, len(output)), "error": phalanx.Loss(away, len(output))}

    def callbacks(self) -> list[phalanx.Callback]:
        stopping = [EarlyStopping("score", self.patience, mode="max")] if self.patience else []
        return [*stopping, *([EMA(0.5, evaluate=True)] if self.average else [])]


def level(run: Path, file: str = "model") -> float:
    return float(load_file(run / "final" / f"{file}.safetensors")["level"][0])


@pytest.mark.parametrize(
    ("task", "layout", "options", "best", "last"),
    [
        (Hill(keep_best="score"), "dp=2", {"save_steps": 1, "keep": 1}, 4, 8),
        (Hill(keep_best="min:error"), "fsdp=2", {"kill": "1@5"}, 4, 8),
        (Hill(keep_best="score", patience=2), "dp=1", {}, 4, 7),
        (Hill(keep_best="error", top=99.0), "dp=1", {}, 8, 8),
        (Hill(keep_best="score", steps=20, top=12.3, evaluate_every=3), "dp=1", {}, 12, 20),
    ],
)
def test_a_run_ends_with_the_weights_that_were_best(
    tmp_path: Path, task: Hill, layout: str, options: dict[str, Any], best: int, last: int
) -> None:
    run, on = tmp_path / "run", f"local:{Layout.parse(layout).world}"
    trained = phalanx.train(task, layout, on=on, run=run, device="cpu", quiet=True, **options)
    assert trained.verdict.holds
    assert level(run) == best
    manager, name = manager_at(run / "checkpoints"), task.keep_best.removeprefix("min:")
    value = -((best - task.top) ** 2) * (1 if name == "score" else -1)
    assert manager.best() == Best(best, name, pytest.approx(value, rel=1e-5))
    assert {best, last} <= set(manager.steps())
    if options.get("keep") == 1:
        assert len(manager.steps()) <= 3, "beside these the last one that a good step followed"
    assert len(trained.losses) == last
    assert f"of step {best}, whose {name}" in str(trained.verdict), str(trained.verdict)
    assert verify(str(run)).holds
    again = phalanx.train(task, layout, on=on, run=run, resume=True, device="cpu", quiet=True)
    assert "is finished" in again.verdict.summary


def test_a_run_that_goes_on_still_knows_the_best(tmp_path: Path) -> None:
    for steps in (6, 9):
        trained = phalanx.train(
            Hill(keep_best="score", steps=steps),
            run=tmp_path / "run",
            resume=steps > 6,
            device="cpu",
            quiet=True,
            keep=1,
        )
        assert level(tmp_path / "run") == 4
        assert len(trained.losses) == steps
    (tmp_path / "run" / "checkpoints" / "best.json").unlink()
    phalanx.train(Hill(keep_best="score", steps=11), run=tmp_path / "run", resume=True, device="cpu", quiet=True)
    assert level(tmp_path / "run") == 9, "what is not known as the best any more is not taken for it"


def test_the_best_average_is_left_with_its_weights(tmp_path: Path) -> None:
    phalanx.train(Hill(keep_best="score", average=True), run=tmp_path / "run", device="cpu", quiet=True)
    averages = [0.0]
    for step in range(1, 9):
        averages.append(0.5 * averages[-1] + 0.5 * step)
    best = min(range(1, 9), key=lambda step: abs(averages[step] - 4))
    assert level(tmp_path / "run") == best
    assert level(tmp_path / "run", "ema") == averages[best]


def test_evaluating_a_run_tells_no_callback(tmp_path: Path) -> None:
    """``on_evaluation`` belongs to a run: a callback that keeps the best would keep what is only looked at."""
    path = tmp_path / "task.py"
    path.write_text(
        "import dataclasses\nimport phalanx\nfrom tests.test_callbacks import Hill\n\n\n"
        "class Told(phalanx.Callback):\n"
        "    def on_evaluation(self, engine, measures):\n"
        "        with open('told', 'a') as file:\n            file.write('told ')\n\n\n"
        "@dataclasses.dataclass\nclass Watched(Hill):\n"
        "    def callbacks(self):\n        return [Told()]\n"
    )
    from tests.test_cli import phalanx as shell

    shell("train", f"{path}:Watched", "--steps", "2", "--run", "run", "--device", "cpu", cwd=tmp_path)
    before = (tmp_path / "told").read_text()
    for data in ("held-out", "training"):
        shell("evaluate", "run", "--data", data, cwd=tmp_path)
    assert (tmp_path / "told").read_text() == before


def test_measures_are_best_at_their_lowest_or_highest() -> None:
    assert {direction_of(name) for name in ("loss", "val_loss", "word_error", "rmse", "nll", "perplexity")} == {"min"}
    assert {direction_of(name) for name in ("dice", "accuracy", "mAP", "f1", "ndcg", "glossary", "terror_score")} == {
        "max"
    }


def test_the_rate_falls_as_torchs_does() -> None:
    torch.manual_seed(0)
    for options in ({}, {"patience": 1}, {"patience": 0, "cooldown": 2}, {"patience": 2, "end": 0.01}):
        ours = ReduceLROnPlateau("score", factor=0.3, mode="min", **{"patience": 3} | options)
        weight = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer,
            factor=0.3,
            patience=ours.patience,
            cooldown=ours.cooldown,
            threshold=0.0,
            min_lr=ours.end,
            eps=0.0,
        )
        for value in torch.randn(60).tolist():
            ours.on_evaluation(Told(), {"score": value})  # type: ignore[arg-type]
            theirs.step(value)
            assert ours.rate_factor() == pytest.approx(optimizer.param_groups[0]["lr"])
        again = ReduceLROnPlateau("score", factor=0.3, patience=ours.patience, mode="min")
        again.load_state_dict(ours.state_dict())
        assert again.rate_factor() == ours.rate_factor() < 1


def test_a_run_at_a_plateau_learns_more_slowly(tmp_path: Path) -> None:
    """The score is best after four steps: from the evaluation on that sees it worse, steps are half as long."""
    task = Hill(rate="plateau:measure=score,factor=0.5,patience=0", steps=7)
    trained = phalanx.train(task, run=tmp_path / "run", device="cpu", quiet=True, kill="0@6")
    rates = [event["lr"] for event in trained.run.ledger().values()]
    assert rates == [1, 1, 1, 1, 1, 0.5, 0.25]


class Careless(phalanx.Callback):
    def on_step(self, engine: Engine, metrics: Any) -> None:
        engine.optimizer.param_groups[0]["lr"] *= 0.1


@dataclass
class CarelessTask(Digits):
    def callbacks(self) -> list[phalanx.Callback]:
        return [Careless()]


def test_a_rate_that_is_set_from_outside_is_not_lost_silently() -> None:
    with Engine(CarelessTask(), device="cpu") as engine:
        batches = engine.batches()
        engine.step(next(batches))
        with pytest.raises(WrongUse, match=r"was set to .* by something else.*rate_factor\(\)"):
            engine.step(next(batches))


def test_the_best_by_two_measures_is_refused() -> None:
    @dataclass
    class Two(Hill):
        def callbacks(self) -> list[phalanx.Callback]:
            return [KeepBest("score")]

    with pytest.raises(WrongUse, match="2 KeepBest"):
        Engine(Two(keep_best="score"), device="cpu")
    with pytest.raises(WrongUse, match="keep_best=score looks at evaluations"):
        phalanx.train(Hill(keep_best="score", evaluate_every=0), device="cpu", quiet=True)
    with pytest.raises(WrongUse, match="did you mean 'score'"):
        phalanx.train(Hill(keep_best="scores"), device="cpu", quiet=True)
