"""Callbacks are called in order on every rank, end a run for all, fail by name, and go on where a run was left."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import phalanx
from phalanx import EMA, Engine, Run, WrongUse, check
from phalanx.train.calling import labelled, made_callbacks
from tests.checkpoints import checkpointing, manager_at
from tests.ranks import Ranks
from tests.tasks import Digits
from tests.test_cli import GOOD
from tests.test_cli import phalanx as run_phalanx

OWN = '''

class Noting(phalanx.Callback):
    """Notes what it is told, a file a rank."""

    count = 0

    def note(self, *words):
        with open(f"seen-{os.environ['RANK']}.txt", "a") as file:
            print(*words, file=file)

    def on_start(self, engine):
        self.note("start", engine.step_number, self.count)

    def on_gradients(self, engine, divisor, without):
        self.note("gradients", divisor, sorted(without))

    def before_update(self, engine):
        self.note("update")

    def on_step(self, engine, metrics):
        self.count += 1
        self.note("step", metrics.step, self.count)

    def on_evaluation(self, engine, measures):
        self.note("evaluation", engine.step_number, sorted(measures))

    def on_checkpoint(self, engine, step, where):
        assert os.path.exists(f"{where}/index.json") or os.listdir(where)
        self.note("checkpoint", step)

    def on_end(self, engine):
        self.note("end", engine.step_number)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Quits(phalanx.Callback):
    def on_step(self, engine, metrics):
        if engine.rank == 1 and engine.step_number == 3:
            engine.stop("rank 1 has seen enough")


class Fails(phalanx.Callback):
    def on_checkpoint(self, engine, step, where):
        if engine.rank == 1:
            engine.nothing = 1 / 0


@dataclass
class Watched(Digits):
    kind: str = "notes"

    def callbacks(self):
        others = {"quits": [Quits()], "fails": [Fails()], "ema": [phalanx.EMA(0.5)]}
        early = phalanx.EarlyStopping("accuracy", patience=2, min_delta=10.0, mode="max")
        if self.kind == "misspelt":
            early.measure = "acuracy"
        return [Noting(), *others.get(self.kind, []), *([early] if self.kind in ("early", "misspelt") else [])]
'''
WORDS = ("--layout", "dp=2", "--on", "local:2", "--run", "run", "--unchecked")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(GOOD + OWN)
    return tmp_path


def train(folder: Path, kind: str, *words: str, code: int = 0) -> str:
    done = run_phalanx("train", "own.py:Watched", "--set", f"kind={kind}", *WORDS, *words, cwd=folder)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def seen(folder: Path, rank: int) -> list[str]:
    return (folder / f"seen-{rank}.txt").read_text().splitlines()


def test_every_rank_is_told_everything_in_the_same_order(folder: Path) -> None:
    train(folder, "notes", "--steps", "4", "--set", "evaluate_every=2", "--save-steps", "3")
    told = seen(folder, 0)
    assert told == seen(folder, 1)
    kinds = [line.split()[0] for line in told if not line.startswith("checkpoint")]
    one = ["gradients", "update", "step"]
    assert kinds == ["start", *one, *one, "evaluation", *one, *one, "evaluation", "end"]
    assert "gradients 8.0 []" in told
    assert [line for line in told if line.startswith("checkpoint")] == ["checkpoint 3", "checkpoint 4"]
    assert "evaluation 2 ['accuracy', 'loss']" in told


def test_one_rank_ends_the_run_for_all_and_it_is_finished(folder: Path) -> None:
    said = train(folder, "quits")
    run = Run(folder / "run")
    assert "trained Watched for 4 steps of the 6 planned on dp=2: rank 1 has seen enough" in said
    assert "certificate: 4 steps of 6 planned, ended by the task (rank 1 has seen enough)" in said
    found = json.loads(run.certificate_path.read_text())
    assert (found["steps"], found["planned"], found["ended"]) == (4, 6, "rank 1 has seen enough")
    assert list(run.ledger()) == [0, 1, 2, 3]
    assert seen(folder, 0)[-1] == seen(folder, 1)[-1] == "end 4"
    assert run.weights_path.exists()
    assert manager_at(run.checkpoints_path).steps()[-1] == 4

    assert "is finished" in train(folder, "quits", "--resume")
    run.weights_path.unlink()
    again = train(folder, "quits", "--resume")  # which finds that it has ended, and leaves its weights again
    assert "for 4 steps of the 6 planned" in again
    assert run.weights_path.exists()
    assert list(run.ledger()) == [0, 1, 2, 3]

    more = train(folder, "quits", "--resume", "--steps", "8")
    assert "trained Watched for 8 steps on dp=2" in more
    assert list(run.ledger()) == list(range(8))
    assert json.loads(run.certificate_path.read_text())["ended"] is None
    assert seen(folder, 0)[-1] == "end 8"
    assert "start 4 4" in seen(folder, 0), "a callback's state was restored"


def test_a_run_that_stopped_early_can_have_been_interrupted(folder: Path) -> None:
    words = ("--set", "evaluate_every=2", "--steps", "12", "--save-steps", "1")
    want = train(folder, "early", *words)
    assert "for 7 steps of the 12 planned" in want, "evaluated after 2, 4 and 6, of which the first is the best"
    plain = load_file(folder / "run" / "final" / "model.safetensors")
    (folder / "run").rename(folder / "calm")
    said = train(folder, "early", *words, "--kill", "1@6")
    assert "for 7 steps of the 12 planned" in said
    assert "ranks were started again once" in said
    found = load_file(folder / "run" / "final" / "model.safetensors")
    assert all(found[name].equal(tensor) for name, tensor in plain.items())


def test_what_a_callback_raises_is_told_with_its_name_and_line(folder: Path) -> None:
    said = train(folder, "fails", "--save-steps", "2", "--restarts", "0", code=1)
    assert "rank 1 failed first: ZeroDivisionError: division by zero" in said
    assert "Fails.on_checkpoint, a callback of Watched, raised this" in said
    assert "engine.nothing = 1 / 0" in said
    assert "goes on after step 2" in said
    assert manager_at(folder / "run" / "checkpoints").steps() == [2]


def test_a_measure_that_there_is_none_of_is_refused_before_the_first_step(folder: Path) -> None:
    said = train(folder, "misspelt", "--set", "evaluate_every=3", code=2)
    assert "EarlyStopping watches 'acuracy', which evaluations do not measure; did you mean 'accuracy'?" in said
    assert not any(line.startswith("step") for line in seen(folder, 0))


def test_a_rollback_takes_callbacks_back_too(folder: Path) -> None:
    """The step with the spoiled sample is left out, and an evaluation that it came after is made again."""
    words = (
        "--set",
        "spoil=17",
        "--set",
        "samples=48",
        "--set",
        "evaluate_every=1",
        "--bad",
        "rollback",
        "--save-steps",
        "1",
    )
    train(folder, "notes", *words)
    told = seen(folder, 0)
    bad = next(int(event["step"]) for event in Run(folder / "run").events(0, "bad"))
    counts = [line.split()[1:] for line in told if line.startswith("step")]
    want = [[str(step), str(step + 1 - (step > bad))] for step in range(6)]
    assert counts == want, "after the bad step they count on from before it"
    assert told.count(f"evaluation {bad} ['accuracy', 'loss']") == 2


def test_averages_are_left_beside_the_weights(folder: Path) -> None:
    train(folder, "ema")
    final = folder / "run" / "final"
    weights, averages = load_file(final / "model.safetensors"), load_file(final / "ema.safetensors")
    assert weights.keys() == averages.keys()
    assert not any(weights[name].equal(averages[name]) for name in weights)
    done = run_phalanx("verify", "run", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    for start in ("run", "run/final", "run/final/ema.safetensors"):
        words = ("--init-from", start, "--run", f"from-{Path(start).stem}", "--steps", "1", "--unchecked")
        done = run_phalanx("train", "own.py:Watched", *words, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr


@dataclass
class Giving(Digits):
    gives: Any = ()

    def callbacks(self) -> Any:
        return self.gives


ONE = EMA()


class Plain:
    def on_step(self, engine: Any, metrics: Any) -> None: ...


@pytest.mark.parametrize(
    ("gives", "words"),
    [
        (None, r"Giving.callbacks returned a NoneType, not callbacks. Return a list of them: return \[phalanx.EMA"),
        (ONE, "returned one EMA and no list"),
        ([EMA], r"has the class EMA itself. Make one of it: EMA\(\)"),
        ([Plain()], r"has a Plain, which is no callback.*class Mine\(phalanx.Callback\)"),
        ([ONE, ONE], "the same EMA twice"),
    ],
)
def test_what_is_no_list_of_callbacks_is_refused(gives: Any, words: str) -> None:
    with pytest.raises(WrongUse, match=words):
        made_callbacks(Giving(gives=gives))
    with pytest.raises(WrongUse, match=rf"{words}.*test_calling.py:\d+"):
        check(Giving(gives=gives))
    with pytest.raises(WrongUse, match=words):
        Engine(Giving(gives=gives), device="cpu")


@dataclass
class Field(Digits):
    callbacks: Any = ()  # type: ignore[assignment]


def test_a_setting_is_no_method() -> None:
    with pytest.raises(WrongUse, match=r"Field.callbacks is a tuple. Make it a method: def callbacks\(self\)"):
        made_callbacks(Field())


def test_two_of_a_kind_are_kept_apart() -> None:
    assert list(labelled([EMA(0.5), phalanx.Freeze("x", 1), EMA(0.9)])) == ["EMA", "Freeze", "EMA-2"]


class Apart(Digits):
    def callbacks(self) -> list[phalanx.Callback]:
        return [EMA(0.5)] if os.environ["RANK"] == "0" else []


def refused() -> str:
    with pytest.raises(WrongUse) as refusal:
        Engine(Apart(), "dp=2", device="cpu")
    return str(refusal.value)


def test_ranks_must_have_the_same_ones(ranks: Ranks) -> None:
    for said in ranks(2, refused):
        assert said.startswith("the callbacks of rank 1 is not that of rank 0 (rank ")
        assert said.endswith("Task.callbacks must give every rank the same ones, in the same order.")


class Hoarding(phalanx.Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": {1, 2}}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_state_that_cannot_be_saved_is_refused() -> None:
    with (
        Engine(Giving(gives=[Hoarding()]), device="cpu") as engine,
        pytest.raises(WrongUse, match=r"Hoarding.state_dict has what cannot be saved .*set"),
    ):
        engine.facts()


def test_two_that_evaluate_with_weights_of_theirs_are_refused() -> None:
    both = [EMA(0.5, evaluate=True), EMA(0.9, evaluate=True)]
    with Engine(Giving(gives=both), device="cpu") as engine:
        engine.step(next(engine.batches()))
        with pytest.raises(WrongUse, match="2 callbacks of Giving want evaluations"):
            engine.evaluate()


class Numbered(Hoarding):
    def state_dict(self) -> dict[str, Any]:
        return {"best": [{3: 0.5}]}


def test_keys_that_would_come_back_as_text_are_refused() -> None:
    with (
        Engine(Giving(gives=[Numbered()]), device="cpu") as engine,
        pytest.raises(WrongUse, match=r"Numbered.state_dict has what cannot be saved \(the key 3 would"),
    ):
        engine.facts()


def test_a_run_refuses_two_averages_to_evaluate_with_before_its_first_step() -> None:
    with (
        Engine(Giving(gives=[EMA(0.5, evaluate=True), EMA(0.9, evaluate=True)]), device="cpu") as engine,
        pytest.raises(WrongUse, match="has several EMA"),
    ):
        engine.callbacks.call("on_start", engine)


@dataclass
class CannotEvaluate(Digits):
    def callbacks(self) -> list[phalanx.Callback]:
        return [EMA(0.5, evaluate=True)]

    def evaluate(self, output: Any, batch: Any) -> Any:
        raise RuntimeError("no")


def test_an_evaluation_that_fails_gives_the_weights_back() -> None:
    with Engine(CannotEvaluate(), device="cpu") as engine:
        for batch in islice(engine.batches(), 3):
            engine.step(batch)
        before = {name: weight.clone() for name, weight in engine.whole_weights().items()}
        with pytest.raises(RuntimeError, match="no"):
            engine.evaluate()
        assert all(torch.equal(before[name], weight) for name, weight in engine.whole_weights().items())


class Elsewhere(phalanx.Callback):
    def __init__(self) -> None:
        self.kept = {"0.wieght": torch.zeros(3)}

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.kept


def test_tensors_of_no_weight_are_refused(tmp_path: Path) -> None:
    with (
        Engine(Giving(gives=[Elsewhere()]), device="cpu") as engine,
        checkpointing(engine, tmp_path) as checkpointer,
        pytest.raises(WrongUse, match=r"Elsewhere.tensors\(\) has '0.wieght', .* did you mean '0.weight'\?"),
    ):
        checkpointer.save_now()


class ByRank(phalanx.Callback):
    def trains(self, step: int, weight: str) -> bool:
        return step < 1 or weight != "0.bias" or os.environ["RANK"] == "0"


def apart(layout: str) -> str:
    with Engine(Giving(gives=[ByRank()]), layout, device="cpu") as engine:
        batches = engine.batches()
        engine.step(next(batches))
        with pytest.raises(WrongUse) as refusal:
            engine.step(next(batches))
    return f"{engine.step_number} {refusal.value}"


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,exact=4", "fsdp=2"])
def test_ranks_must_train_the_same_weights(ranks: Ranks, layout: str) -> None:
    for said in ranks(2, apart, layout):
        assert said.startswith("1 ranks train other weights in step 2: trains(step, weight) of a callback of Giving")


class Misspelt(phalanx.Callback):
    def on_steps(self, engine: Any, metrics: Any) -> None: ...


class OneWay(phalanx.Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"count": 1}


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (Misspelt(), r"has a Misspelt whose on_steps nothing calls. Call it on_step."),
        (OneWay(), r"has a OneWay with state_dict and without load_state_dict"),
    ],
    ids=["misspelt", "one way"],
)
def test_a_callback_that_could_not_work_is_refused(callback: phalanx.Callback, words: str) -> None:
    with pytest.raises(WrongUse, match=words):
        made_callbacks(Giving(gives=[callback]))
