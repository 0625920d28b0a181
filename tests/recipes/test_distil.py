"""The recipe `distil`: a student learns what a teacher predicts, and the teacher stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import phalanx
from phalanx import Layout
from phalanx.recipes.distil import Distil
from phalanx.recipes.sft import SFT
from tests.ranks import Ranks
from tests.test_cli import phalanx as command

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the dev extra has it)")

SMALL: dict[str, Any] = {"small": True, "length": 64, "global_batch": 4}


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned the shipped answers."""
    to, task = tmp_path_factory.mktemp("taught"), SFT(steps=60, learning_rate=5e-3)
    with phalanx.Engine(task, device="cpu") as engine:
        for batch in engine.batches():
            engine.step(batch)
        weights = engine.whole_weights()
    model = task.model()
    model.load_state_dict(weights)
    model.save_pretrained(to)
    task._tokenizer.save_pretrained(to)
    return to


def test_a_student_comes_near_its_teacher(taught: Path) -> None:
    task = Distil(teacher=str(taught), tokenizer=str(taught), steps=40, learning_rate=5e-3, mix=0.9, temperature=2.0)
    with phalanx.Engine(task, device="cpu") as engine:
        first = engine.evaluate()
        before = engine.whole_weights()
        metrics = [engine.step(batch) for batch in engine.batches()]
        after, last = engine.whole_weights(), engine.evaluate()
    assert last["divergence"] < 0.5 * first["divergence"]
    assert last["cross_entropy"] < first["cross_entropy"] - 1
    assert metrics[-1].losses.keys() == {"divergence", "cross_entropy"}
    assert all(torch.equal(after[name], before[name]) == name.startswith("teacher.") for name in before)


def losses(settings: dict[str, Any], layout: str = "dp=1") -> list[float]:
    with phalanx.Engine(Distil(**settings), Layout.parse(layout), device="cpu") as engine:
        return [engine.step(batch).loss for batch in engine.batches()]


@pytest.mark.parametrize(("divergence", "mix"), [("forward", 0.5), ("reverse", 1.0)])
def test_its_loss_is_that_of_whole_logits(divergence: Any, mix: float) -> None:
    settings = SMALL | {"divergence": divergence, "mix": mix, "temperature": 2.0, "steps": 1}
    task = Distil(**settings)
    with phalanx.Engine(task, device="cpu") as engine:
        model = task.model()
        model.load_state_dict(engine.whole_weights())
        batch = next(engine.batches())
        found = engine.step(batch).loss
        tensors = batch.micro_batches[0].tensors
    with torch.no_grad():
        output = model(**task.inputs(tensors))
    counted = tensors["targets"] >= 0
    own, goal = ((output[name][counted] / 2).log_softmax(-1) for name in ("logits", "teacher"))
    apart = F.kl_div(own, goal, log_target=True, reduction="batchmean")
    if divergence == "reverse":
        apart = F.kl_div(goal, own, log_target=True, reduction="batchmean")
    hard = F.cross_entropy(output["logits"][counted], tensors["targets"][counted])
    assert found == pytest.approx(float(mix * 4 * apart + (1 - mix) * hard), rel=1e-5)


@pytest.mark.parametrize("layout", ["dp=2", "fsdp=2", "tp=2", "cp=2"])
def test_both_models_are_spread(ranks: Ranks, layout: str) -> None:
    settings = SMALL | {"steps": 3, "temperature": 2.0, "mix": 0.7, "learning_rate": 1e-3}
    expected = losses(settings)
    assert ranks(2, losses, settings, layout)[0] == pytest.approx(expected, abs=1e-5)
    reverse = settings | {"divergence": "reverse", "steps": 2}
    assert ranks(2, losses, reverse, layout)[0] == pytest.approx(losses(reverse), abs=1e-5)


def test_what_cannot_be_is_refused(taught: Path) -> None:
    for settings, words in (
        ({"divergence": "sideways"}, "divergence='sideways' is not known. Choose forward or reverse"),
        ({"temperature": 0.0}, "temperature=0.0 divides nothing"),
        ({"mix": 0.0}, "mix=0.0 is no share of the divergence"),
    ):
        with pytest.raises(phalanx.WrongUse, match=words):
            Distil(**settings).check()
    config = transformers.AutoConfig.from_pretrained(taught)
    config.vocab_size += 8
    config.save_pretrained(taught / "other")
    with pytest.raises(phalanx.WrongUse, match="Choose two models of one family"):
        Distil(teacher=str(taught / "other")).model()


def test_it_trains_as_it_comes(tmp_path: Path) -> None:
    done = command("train", "distil", "--steps", "2", "--device", "cpu", "--run", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list(phalanx.Run(tmp_path / "run").events(0, "step"))) == 2
    assert (tmp_path / "run" / "answers" / "step-00000002.jsonl").is_file()
    assert "\nanswers: run/answers/step-00000002.jsonl\n" in done.stdout
