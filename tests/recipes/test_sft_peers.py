"""The recipe `sft` beside published tools: the same job gives the same losses, step by step."""

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
from phalanx.recipes.sft import HEALTH, SFT
from tests.ranks import Ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the dev extra has it)")

STEPS, BATCH = 20, 8
TOLERANCE = 1e-5


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # or its bar leaves a thread behind
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)  # or TRL tells its makers
    torch.manual_seed(0)
    task = SFT(small=True)
    task.model().save_pretrained(tmp_path / "base")
    task._tokenizer.save_pretrained(tmp_path / "base")
    return {
        "base": str(tmp_path / "base"), "length": 128, "packed": False, "share_held_out": 0.0, "global_batch": BATCH,
        "steps": STEPS, "learning_rate": 1e-3, "rate": "constant", "warmup_steps": 0, "weight_decay": 0.0, "clip": 1.0,
    }  # fmt: skip


def losses(settings: dict[str, Any], layout: str) -> list[float]:
    with phalanx.Engine(SFT(**settings), Layout.parse(layout), device="cpu") as engine:
        return [engine.step(batch).loss for batch in engine.batches()]


def in_our_order(settings: dict[str, Any]) -> list[int]:
    """The rows that our steps take, one after another."""
    order = Order(len(SFT(**settings).data()), BATCH, SFT(**settings).seed)
    return [int(row) for step in range(STEPS) for row in order.ids(step)]


def compare(ranks: Ranks, settings: dict[str, Any], expected: list[float]) -> None:
    assert len(expected) == STEPS
    assert np.abs(np.array(losses(settings, "dp=1")) - expected).max() < TOLERANCE
    for layout in ("dp=4", "fsdp=2,tp=2"):
        assert np.abs(np.array(ranks(4, losses, settings, layout)[0]) - expected).max() < TOLERANCE


def test_losses_are_those_of_trl(ranks: Ranks, settings: dict[str, Any], tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed (the dev extra has it)")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed (the dev extra has it)")
    rows = RowFile(HEALTH)
    talks = [
        [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        for row in (rows[index] for index in in_our_order(settings))
    ]

    class InOrder(trl.SFTTrainer):
        """Rows are there in the order of our steps."""

        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    config = trl.SFTConfig(
        output_dir=str(tmp_path / "trl"), max_steps=STEPS, per_device_train_batch_size=BATCH, max_length=128,
        learning_rate=1e-3, lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, max_grad_norm=1.0,
        logging_steps=1, assistant_only_loss=True, packing=False, use_cpu=True, bf16=False, report_to=[],
        save_strategy="no", gradient_checkpointing=False, optim="adamw_torch", disable_tqdm=True,
    )  # fmt: skip
    trainer = InOrder(
        model=transformers.AutoModelForCausalLM.from_pretrained(settings["base"], dtype=torch.float32), args=config,
        train_dataset=datasets.Dataset.from_list([{"messages": talk} for talk in talks]),
        processing_class=transformers.AutoTokenizer.from_pretrained(settings["base"]),
    )  # fmt: skip
    caught: list[float] = []
    computed = trainer.compute_loss

    def noted(*args: Any, **kwargs: Any) -> Any:
        found = computed(*args, **kwargs)
        caught.append(float((found[0] if isinstance(found, tuple) else found).detach()))
        return found

    trainer.compute_loss = noted
    trainer.train()
    compare(ranks, settings, caught)


def test_losses_are_those_of_peft_in_a_plain_loop(ranks: Ranks, settings: dict[str, Any], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed (the dev extra has it)")
    torch.manual_seed(1)
    base = transformers.AutoModelForCausalLM.from_pretrained(settings["base"], dtype=torch.float32)
    linears = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, target_modules=linears))
    model.save_pretrained(tmp_path / "lora")
    settings |= {"lora": 4, "lora_alpha": 8, "adapter": str(tmp_path / "lora"), "learning_rate": 1e-2}
    task = SFT(**settings)
    data, order = task.data(), in_our_order(settings)
    learned = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=1e-2, weight_decay=0.0)
    expected = []
    for step in range(STEPS):
        batch = task.collate([data[row] for row in order[step * BATCH : (step + 1) * BATCH]])
        logits = model(input_ids=batch["tokens"]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=-100)
        expected.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
    compare(ranks, settings, expected)
