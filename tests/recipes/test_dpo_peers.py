"""The recipe `dpo` beside published tools: the same job gives the same losses, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tqdm import tqdm

import phalanx
from phalanx import Layout
from phalanx.data.order import Order
from phalanx.data.row_file import RowFile
from phalanx.recipes.dpo import DPO
from phalanx.recipes.preferring import PREFERENCES
from tests.ranks import Ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the dev extra has it)")

STEPS, BATCH, BETA = 20, 5, 0.5  # an epoch of the shipped rows is a little more
TOLERANCE = 1e-5


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # or its bar leaves a thread behind
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)  # or TRL tells its makers
    torch.manual_seed(0)
    task = DPO(small=True)
    task.model().save_pretrained(tmp_path / "base")
    task._tokenizer.save_pretrained(tmp_path / "base")
    return {
        "base": str(tmp_path / "base"), "length": 128, "share_held_out": 0.0, "global_batch": BATCH, "steps": STEPS,
        "learning_rate": 1e-3, "rate": "constant", "warmup_steps": 0, "weight_decay": 0.0, "clip": 1.0, "beta": BETA,
    }  # fmt: skip


def losses(settings: dict[str, Any], layout: str) -> list[float]:
    with phalanx.Engine(DPO(**settings), Layout.parse(layout), device="cpu") as engine:
        return [engine.step(batch).loss for batch in engine.batches()]


def in_our_order(settings: dict[str, Any]) -> list[int]:
    """The rows that our steps take, one after another."""
    order = Order(len(DPO(**settings).data()), BATCH, DPO(**settings).seed)
    return [int(row) for step in range(STEPS) for row in order.ids(step)]


def compare(ranks: Ranks, settings: dict[str, Any], expected: list[float]) -> None:
    assert len(expected) == STEPS
    assert max(expected) - min(expected) > 0.05
    assert np.abs(np.array(losses(settings, "dp=1")) - expected).max() < TOLERANCE
    for layout in ("dp=4", "fsdp=2,tp=2"):
        assert np.abs(np.array(ranks(4, losses, settings, layout)[0]) - expected).max() < TOLERANCE


def trls(settings: dict[str, Any], folder: Path, kind: str) -> list[float]:
    """The losses of TRL's trainer on rows that come in our order."""
    trl = pytest.importorskip("trl", reason="trl is not installed (the dev extra has it)")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed (the dev extra has it)")
    rows = RowFile(PREFERENCES)
    talks = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            **{name: [{"role": "assistant", "content": row[name]}] for name in ("chosen", "rejected")},
        }
        for row in (rows[index] for index in in_our_order(settings))
    ]

    class InOrder(trl.DPOTrainer):
        """Rows are there in the order of our steps."""

        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    config = trl.DPOConfig(
        output_dir=str(folder / "trl"), max_steps=STEPS, per_device_train_batch_size=BATCH, max_length=128,
        learning_rate=1e-3, lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, max_grad_norm=1.0,
        logging_steps=1, use_cpu=True, bf16=False, report_to=[], save_strategy="no", gradient_checkpointing=False,
        optim="adamw_torch", disable_tqdm=True, beta=BETA, loss_type=[kind],
    )  # fmt: skip
    trainer = InOrder(
        model=transformers.AutoModelForCausalLM.from_pretrained(settings["base"], dtype=torch.float32), args=config,
        ref_model=transformers.AutoModelForCausalLM.from_pretrained(settings["base"], dtype=torch.float32),
        train_dataset=datasets.Dataset.from_list(talks),
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
    return caught


@pytest.mark.parametrize(("method", "kind"), [("dpo", "sigmoid"), ("ipo", "ipo")])
def test_losses_are_those_of_trl(
    ranks: Ranks, settings: dict[str, Any], tmp_path: Path, method: str, kind: str
) -> None:
    compare(ranks, settings | {"method": method}, trls(settings, tmp_path, kind))


def plain_losses(settings: dict[str, Any]) -> list[float]:
    """KTO and SimPO in a plain loop, of the same samples, with a second model as the reference."""
    task = DPO(**settings)
    model, reference = (transformers.AutoModelForCausalLM.from_pretrained(settings["base"]) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    data, order, found = task.data(), in_our_order(settings), []
    for step in range(STEPS):
        batch = task.collate([data[row] for row in order[step * BATCH : (step + 1) * BATCH]])
        tokens, targets = batch["tokens"].flatten(0, 1), batch["targets"].flatten(0, 1)

        def summed(of: Any, tokens: torch.Tensor = tokens, targets: torch.Tensor = targets) -> torch.Tensor:
            rows = of(input_ids=tokens).logits.log_softmax(-1)
            picked = rows.gather(2, targets.clamp(0).unsqueeze(2)).squeeze(2)
            return (picked * (targets >= 0)).sum(1).view(-1, 2)

        own = summed(model)
        if task.method == "simpo":
            each = own / (targets >= 0).sum(1).view(-1, 2)
            loss = -F.logsigmoid(task.beta * (each[:, 0] - each[:, 1]) - task.gamma).mean()
        else:
            with torch.no_grad():
                ratios = -summed(reference)
            ratios = ratios + own
            bar = ratios[:, 1].detach().mean().clamp(min=0)
            good = batch["good"].bool()
            wanted = torch.where(good, ratios[:, 0] - bar, bar - ratios[:, 0])
            loss = (1 - torch.sigmoid(task.beta * wanted)).mean()
        found.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return found


@pytest.mark.parametrize("method", ["kto", "simpo"])
def test_losses_are_those_of_a_plain_loop(ranks: Ranks, settings: dict[str, Any], method: str) -> None:
    settings |= {"method": method}
    compare(ranks, settings, plain_losses(settings))
