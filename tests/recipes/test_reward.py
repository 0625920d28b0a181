"""The recipe `reward`: better answers get higher numbers, and Hugging Face reads what was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tqdm import tqdm

import phalanx
from phalanx import Layout
from phalanx.data.order import Order
from phalanx.data.row_file import RowFile
from phalanx.recipes.preferring import PREFERENCES
from phalanx.recipes.reward import Reward
from phalanx.recipes.sft import SFT
from tests.ranks import Ranks
from tests.test_cli import phalanx as command

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the dev extra has it)")

STEPS, BATCH = 20, 5
TOLERANCE = 1e-5


def test_it_learns_to_tell_answers_apart() -> None:
    with phalanx.Engine(Reward(steps=40, learning_rate=1e-3), device="cpu") as engine:
        metrics = [engine.step(batch) for batch in engine.batches()]
        held_out = engine.evaluate()
    assert metrics[0].loss > 0.6
    assert sum(each.loss for each in metrics[-5:]) / 5 < 0.2
    assert metrics[-1].logged["rewards/accuracy"] == 1.0
    assert held_out["accuracy"] >= 0.6


def test_the_head_is_trained_beside_lora() -> None:
    task = Reward(small=True, length=64, lora=2)
    trained = [name for name, weight in task.model().named_parameters() if weight.requires_grad]
    assert "score.weight" in trained
    assert sum("lora_" in name for name in trained) == len(trained) - 1
    config = task.model().config
    assert (config.architectures, config.num_labels) == (["LlamaForSequenceClassification"], 1)


def test_rewards_may_be_centered() -> None:
    output = type("Output", (), {"logits": torch.tensor([[1.0], [0.5], [2.0], [3.0]])})
    plain, centered = (Reward(center=center).evaluate(output, {})["loss"] for center in (0.0, 0.1))
    assert float(centered.total - plain.total) == pytest.approx(0.1 * (1.5**2 + 5.0**2))
    with pytest.raises(phalanx.WrongUse, match=r"center=-1.0 is no weight"):
        Reward(center=-1.0).check()


def losses(settings: dict[str, Any], layout: str) -> list[float]:
    with phalanx.Engine(Reward(**settings), Layout.parse(layout), device="cpu") as engine:
        return [engine.step(batch).loss for batch in engine.batches()]


def test_losses_are_those_of_trl(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed (the dev extra has it)")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed (the dev extra has it)")
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # or its bar leaves a thread behind
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)  # or TRL tells its makers
    torch.manual_seed(0)
    task = Reward(small=True)
    task.model().save_pretrained(tmp_path / "base")
    task._tokenizer.save_pretrained(tmp_path / "base")
    settings = {
        "base": str(tmp_path / "base"), "length": 128, "share_held_out": 0.0, "global_batch": BATCH, "steps": STEPS,
        "learning_rate": 1e-3, "rate": "constant", "warmup_steps": 0, "weight_decay": 0.0, "clip": 1.0,
    }  # fmt: skip
    rows, order = RowFile(PREFERENCES), Order(102, BATCH, 0)
    talks = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            **{name: [{"role": "assistant", "content": row[name]}] for name in ("chosen", "rejected")},
        }
        for row in (rows[int(index)] for step in range(STEPS) for index in order.ids(step))
    ]

    class InOrder(trl.RewardTrainer):
        """Rows are there in the order of our steps."""

        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    config = trl.RewardConfig(
        output_dir=str(tmp_path / "trl"), max_steps=STEPS, per_device_train_batch_size=BATCH, max_length=128,
        learning_rate=1e-3, lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, max_grad_norm=1.0,
        logging_steps=1, use_cpu=True, bf16=False, report_to=[], save_strategy="no", gradient_checkpointing=False,
        optim="adamw_torch", disable_tqdm=True, disable_dropout=False,
    )  # fmt: skip
    trainer = InOrder(
        model=transformers.AutoModelForSequenceClassification.from_pretrained(settings["base"], dtype=torch.float32),
        args=config, train_dataset=datasets.Dataset.from_list(talks),
        processing_class=transformers.AutoTokenizer.from_pretrained(settings["base"]),
    )  # fmt: skip
    expected: list[float] = []
    computed = trainer.compute_loss

    def noted(*args: Any, **kwargs: Any) -> Any:
        found = computed(*args, **kwargs)
        expected.append(float((found[0] if isinstance(found, tuple) else found).detach()))
        return found

    trainer.compute_loss = noted
    trainer.train()
    assert len(expected) == STEPS
    assert np.abs(np.array(losses(settings, "dp=1")) - expected).max() < TOLERANCE
    for layout in ("dp=4", "fsdp=2,tp=2"):
        assert np.abs(np.array(ranks(4, losses, settings, layout)[0]) - expected).max() < TOLERANCE


def test_a_head_is_new_where_the_base_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    torch.manual_seed(0)
    task = SFT(small=True)
    task.model().save_pretrained(tmp_path / "causal")
    task._tokenizer.save_pretrained(tmp_path / "causal")
    reward = Reward(base=str(tmp_path / "causal"), length=64, steps=1)
    assert reward.added("score.weight")
    with phalanx.Engine(reward, device="cpu") as engine:
        found = engine.whole_weights()
    assert "what the saved model ends in is not used (lm_head.weight)" in capsys.readouterr().err
    own = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "causal").state_dict()
    assert torch.equal(found["model.layers.1.mlp.up_proj.weight"], own["model.layers.1.mlp.up_proj.weight"])
    reward.model().save_pretrained(tmp_path / "scoring")
    task._tokenizer.save_pretrained(tmp_path / "scoring")
    assert not Reward(base=str(tmp_path / "scoring")).added("score.weight")


def test_hugging_face_reads_what_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    small = ["--set", "small=true", "--set", "length=64", "--steps", "2"]
    for words, code in (
        (["train", "reward", "--run", "whole", *small], 0),
        (["train", "reward", "--run", "low", "--set", "lora=2", *small], 0),
        (["export", "whole", "--to", "out"], 0),
        (["export", "low", "--to", "merged", "--merge"], 0),
        (["export", "low", "--to", "alone"], 2),
    ):
        done = command(*words, cwd=tmp_path)
        assert done.returncode == code, done.stderr
    assert "score.weight was trained beside LoRA, and would be lost without it. Export with --merge." in done.stderr
    for folder in (tmp_path / "out", tmp_path / "merged"):
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        told = tokenizer("Is it safe?", return_tensors="pt")["input_ids"]
        assert model(input_ids=told).logits.shape == (1, 1)
