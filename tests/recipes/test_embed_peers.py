"""The recipe `embed` beside sentence-transformers: the same job gives the same losses, step by step."""

from __future__ import annotations

import json
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
from phalanx.recipes.embed import HEALTH_SEARCH, Embed
from phalanx.recipes.sentence_transformers import Described, describe
from tests.ranks import Ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the dev extra has it)")
st = pytest.importorskip("sentence_transformers", reason="no sentence-transformers (the dev extra has it)")
datasets = pytest.importorskip("datasets", reason="datasets is not installed (the dev extra has it)")

STEPS, BATCH, ROWS = 20, 8, 80
TOLERANCE = 1e-5


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A job of which both sides count the same negatives: no text is there twice."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # or its bar leaves a thread behind
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
    rows = [RowFile(HEALTH_SEARCH)[2 * index] for index in range(ROWS)]
    changed = [row | {"negatives": " ".join(reversed(row["positive"].split()))} for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, changed)))
    torch.manual_seed(0)
    task = Embed()
    config = transformers.BertConfig(
        vocab_size=len(task._tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, pad_token_id=0,
        num_attention_heads=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(tmp_path / "base")
    task._tokenizer.save_pretrained(tmp_path / "base")
    describe(tmp_path / "base", Described(32, "mean", 64, {}))
    return {
        "base": str(tmp_path / "base"), "path": str(tmp_path / "rows.jsonl"), "length": 64, "share_held_out": 0.0,
        "global_batch": BATCH, "steps": STEPS, "learning_rate": 1e-3, "rate": "constant", "warmup_steps": 0,
        "weight_decay": 0.0, "clip": 1.0,
    }  # fmt: skip


def losses(settings: dict[str, Any], layout: str) -> list[float]:
    with phalanx.Engine(Embed(**settings), Layout.parse(layout), device="cpu") as engine:
        return [engine.step(batch).loss for batch in engine.batches()]


@pytest.mark.parametrize("sizes", [[], [16, 8]], ids=["whole", "matryoshka"])
def test_losses_are_those_of_sentence_transformers(
    sizes: list[int], ranks: Ranks, settings: dict[str, Any], tmp_path: Path
) -> None:
    rows = RowFile(settings["path"])
    order = Order(ROWS, BATCH, Embed().seed)
    taken = [rows[int(row)] for step in range(STEPS) for row in order.ids(step)]

    class InOrder(st.SentenceTransformerTrainer):
        """Rows are there in the order of our steps."""

        def get_batch_sampler(self, dataset: Any, batch_size: int, drop_last: bool, **options: Any) -> Any:
            return torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(dataset), batch_size, drop_last)

    losses_of_theirs = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    model = st.SentenceTransformer(settings["base"], device="cpu")
    loss = losses_of_theirs.MultipleNegativesRankingLoss(model)
    if sizes:
        loss = losses_of_theirs.MatryoshkaLoss(model, loss, [32, *sizes])
    config = st.SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path / "theirs"), max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=1e-3,
        lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, max_grad_norm=1.0, use_cpu=True, report_to=[],
        save_strategy="no", optim="adamw_torch", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    columns = {name: [row[name] for row in taken] for name in ("query", "positive", "negatives")}
    trainer = InOrder(model=model, args=config, train_dataset=datasets.Dataset.from_dict(columns), loss=loss)
    expected: list[float] = []
    computed = trainer.compute_loss

    def noted(*args: Any, **kwargs: Any) -> Any:
        found = computed(*args, **kwargs)
        expected.append(float((found[0] if isinstance(found, tuple) else found).detach()))
        return found

    trainer.compute_loss = noted
    trainer.train()
    assert len(expected) == STEPS
    settings |= {"sizes": sizes}
    assert np.abs(np.array(losses(settings, "dp=1")) - expected).max() < TOLERANCE
    for layout in ("dp=4", "fsdp=2,tp=2", "dp=2,cp=2,micro_batch=2"):
        assert np.abs(np.array(ranks(4, losses, settings, layout)[0]) - expected).max() < TOLERANCE
