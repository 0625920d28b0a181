"""The recipe `dpo`: what is learned, from where the reference comes, and that it is the same however it is spread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx
from phalanx import Layout
from phalanx.models.lora import is_lora
from phalanx.recipes.dpo import DPO, log_probs
from phalanx.train.check.beside import checked
from phalanx.train.overview import Overview
from tests.ranks import Ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the dev extra has it)")

SMALL: dict[str, Any] = {"small": True, "length": 64, "global_batch": 5, "learning_rate": 1e-3}


def trained(
    settings: dict[str, Any], layout: str = "dp=1"
) -> tuple[list[float], list[dict[str, float]], dict[str, float]]:
    with phalanx.Engine(DPO(**settings), Layout.parse(layout), device="cpu") as engine:
        metrics = [engine.step(batch) for batch in engine.batches()]
        return [each.loss for each in metrics], [each.logged for each in metrics], engine.evaluate()


def test_it_learns_to_prefer_the_better_answers() -> None:
    losses, logged, held_out = trained({"steps": 40, "learning_rate": 1e-3})
    assert losses[0] == pytest.approx(0.6931, abs=1e-4)
    assert sum(losses[-5:]) / 5 < 0.3
    assert logged[-1]["rewards/accuracy"] == 1.0
    assert logged[-1]["rewards/margin"] > 1.0
    assert held_out["accuracy"] >= 0.6
    assert held_out["loss"] < 0.6


@pytest.mark.parametrize("method", ["ipo", "kto", "simpo"])
def test_other_methods_learn_too(method: str) -> None:
    losses, logged, held_out = trained({**SMALL, "steps": 30, "method": method, "learning_rate": 3e-3, "beta": 0.5})
    assert sum(losses[-5:]) < sum(losses[:5])
    assert sum(each["rewards/accuracy"] for each in logged[-5:]) > 3
    assert held_out["accuracy"] > 0.5


def test_a_model_kept_beside_is_the_one_it_began_as() -> None:
    settings = SMALL | {"steps": 4}
    once, _, evaluated = trained(settings)
    beside, _, also = trained(settings | {"reference": "beside"})
    assert beside == pytest.approx(once, abs=1e-6)
    assert also == pytest.approx(evaluated, abs=1e-5)


@pytest.mark.parametrize("layout", ["dp=2", "fsdp=2", "tp=2", "cp=2"])
def test_a_model_beside_is_spread_with_it(ranks: Ranks, layout: str) -> None:
    settings = SMALL | {"steps": 2, "reference": "beside"}
    expected = trained(settings)[0]
    assert ranks(2, trained, settings, layout)[0][0] == pytest.approx(expected, abs=1e-6)


def references(settings: dict[str, Any], layout: str) -> torch.Tensor:
    with phalanx.Engine(DPO(**settings), Layout.parse(layout), device="cpu") as engine:
        data = engine.loader.reader.data
        return torch.stack([data[index]["reference"] for index in range(len(data))])


def test_ranks_compute_the_reference_together(ranks: Ranks) -> None:
    settings = SMALL | {"precision": "float64", "share_held_out": 0.8, "lora": 2}
    task = DPO(**settings)
    torch.manual_seed(0)
    expected = references(settings, "dp=1")
    assert len(expected) == len(task.data()) == 20
    for layout in ("fsdp=2,tp=2", "dp=2,pp=2"):
        for found in ranks(4, references, settings, layout):
            assert torch.allclose(found, expected, atol=1e-4)  # norms of this model compute in float32


def test_lora_begins_as_the_reference() -> None:
    with phalanx.Engine(DPO(**SMALL, steps=2, lora=3), device="cpu") as engine:
        metrics = [engine.step(batch) for batch in engine.batches()]
        assert metrics[0].loss == pytest.approx(0.693147, abs=1e-5)
        assert metrics[0].logged["rewards/margin"] == pytest.approx(0, abs=1e-5)
        assert all(is_lora(name) for name, trained in engine.spread.trainable.items() if trained)


def test_labels_may_be_smoothed() -> None:
    task = DPO(label_smoothing=0.1, beta=2.0)
    scores = torch.tensor([[0.3, -0.1], [-1.0, 0.5]])
    logits = 2.0 * (scores[:, 0] - scores[:, 1])
    log = torch.nn.functional.logsigmoid
    expected = -(0.9 * log(logits) + 0.1 * log(-logits)).sum()
    batch = {"reference": torch.zeros(2, 2), "tokens": torch.zeros(2, 2, 2, dtype=torch.long)}
    found = task._compared(scores, 0.0)["loss"]
    assert float(found.total) == pytest.approx(float(expected))
    assert found.count == len(batch["tokens"])


def test_log_probs_are_of_answers_alone() -> None:
    task = DPO(**SMALL)
    torch.manual_seed(0)
    model, data = task.model(), task.data()
    batch = task.collate([data[0], data[1]])
    with torch.no_grad():
        found = log_probs(model(**task.inputs(batch)).logits, batch)
        for sample in range(2):
            for side in range(2):
                tokens, targets = batch["tokens"][sample, side], batch["targets"][sample, side]
                rows = model(input_ids=tokens[None]).logits[0].log_softmax(-1)
                own = sum(float(rows[place, target]) for place, target in enumerate(targets.tolist()) if target >= 0)
                assert float(found[sample, side]) == pytest.approx(own, rel=1e-5)


def test_what_cannot_be_is_refused() -> None:
    for settings, words in (
        ({"method": "ppo"}, "method='ppo' is not known. Choose one of: dpo, ipo, kto, simpo"),
        ({"reference": "never"}, "reference='never' is not known"),
        ({"beta": 0.0}, "beta=0.0 is no factor"),
        ({"label_smoothing": 0.5}, "no share below one half"),
        ({"method": "ipo", "label_smoothing": 0.1}, "label_smoothing would have no effect with method=ipo"),
        ({"gamma": 1.0}, "gamma would have no effect with method=dpo. Leave it out, or set method=simpo"),
        ({"method": "simpo", "reference": "beside"}, "reference would have no effect with method=simpo"),
        ({"method": "kto", "desirable_weight": -1.0}, "desirable_weight=-1.0 is no weight"),
        ({"lora": 2, "base": "somewhere", "adapter": "there"}, "Merge it into its base first"),
    ):
        with pytest.raises(phalanx.WrongUse, match=words):
            DPO(**settings).check()


def test_bad_rows_are_named_and_what_became_of_rows_is_said(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    rows = [{"prompt": f"What is {n}?", "chosen": "A number.", "rejected": "No."} for n in range(20)]
    path.write_text("\n".join(map(json.dumps, [*rows, {"prompt": "What?", "chosen": "This."}])))
    refused = checked(DPO(path=str(path)))
    assert refused.anyway
    assert f"{path}, row 21: it has no rejected" in refused.refusal
    assert "dpo.py" not in refused.refusal
    with phalanx.Engine(DPO(**SMALL, path=str(path), bad_rows="skip"), device="cpu") as engine:
        facts, notes = Overview(engine).facts(), Overview(engine).notes()
    assert facts["rows"].startswith("21: 2 held out, 18 pairs")
    assert any(f"left out: {path}, row 21: it has no rejected" in note for note in notes)
