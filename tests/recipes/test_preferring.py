"""Samples of preferences: some held out, two sequences each."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import phalanx
from phalanx.data.row_file import RowFile
from phalanx.recipes.dpo import DPO
from phalanx.recipes.preferring import PREFERENCES
from phalanx.recipes.reward import Reward
from tests.ranks import Ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the dev extra has it)")


def test_shipped_rows_are_different_and_held_out_in_part() -> None:
    rows = RowFile(PREFERENCES)
    texts = [rows[index] for index in range(len(rows))]
    assert len({row["prompt"] for row in texts}) == len(rows) == 102
    assert all(row["chosen"] != row["rejected"] for row in texts)
    task = Reward()
    data, held = task.data(), task.held_out()
    assert held is not None
    assert (len(data), len(held)) == (92, 10)
    assert task.overview()[0]["rows"].startswith("102: 10 held out, 92 pairs, the longest answer with its prompt has ")


def test_nothing_is_dropped(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=512, n_embd=8, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0.1)
    config.save_pretrained(tmp_path)
    task = Reward(base=str(tmp_path), tokenizer="tiny", length=32)
    model = task.model()
    assert model.config.pad_token_id == task._pad
    assert all(module.p == 0 for module in model.modules() if isinstance(module, torch.nn.Dropout))
    assert sum(isinstance(module, torch.nn.Dropout) for module in model.modules()) > 2
    with pytest.raises(phalanx.WrongUse, match=r"lora_dropout=0\.1 would differ from answer to answer"):
        DPO(lora=2, lora_dropout=0.1).check()


def test_a_batch_has_both_sequences_of_each_sample_in_a_row() -> None:
    task = DPO(share_held_out=0.0)
    data = task.data()
    batch = task.collate([data[0], data[1]])
    inputs = task.inputs(batch)["input_ids"]
    assert inputs.shape == (4, batch["tokens"].shape[-1])
    assert inputs[1].tolist() == batch["tokens"][0, 1].tolist()
    words = [task._tokenizer.decode(row) for row in inputs]
    assert words[0].partition("<|assistant|>")[0] == words[1].partition("<|assistant|>")[0]
    judged = DPO(method="kto", share_held_out=0.0)
    assert len(judged.data()) == 2 * len(data)
    assert judged.overview()[0]["rows"].startswith("102: 102 good and 102 bad")


@pytest.mark.parametrize("task", [DPO, Reward, partial(DPO, method="kto")])
def test_steps_of_about_one_length_or_of_so_many_tokens(task: Any) -> None:
    data = task(small=True, share_held_out=0.0, group_by_length=True, batch_tokens=300).data()
    sizes = np.array([data[index]["tokens"].numel() for index in range(len(data))])
    assert data.lengths.tolist() == sizes.tolist()
    order = data.training_order(4, 0)
    steps = [sizes[order.ids(step)] for step in range(order.steps_in(1))]
    assert max(int(step.sum()) for step in steps) <= 300
    assert len({len(step) for step in steps}) > 1
    assert sum(len(step) * int(step.max()) for step in steps) < 1.1 * sizes.sum()


def losses(task: Any, layout: str) -> list[float]:
    with phalanx.Engine(task, layout, device="cpu") as engine:
        return [engine.step(batch).loss for batch in engine.batches()]


@pytest.mark.parametrize("method", ["kto", pytest.param("dpo", marks=pytest.mark.every)])
def test_steps_of_so_many_tokens_are_the_same_on_any_number_of_ranks(ranks: Ranks, method: Any) -> None:
    task = DPO(
        method=method, small=True, global_batch=4, batch_tokens=400, precision="float64", steps=4, learning_rate=1e-2,
        warmup_steps=0,
    )  # fmt: skip
    alone = losses(task, "dp=1")
    assert alone[0] != pytest.approx(alone[-1], rel=1e-3)
    for found in ranks(4, losses, task, "fsdp=2,tp=2"):
        assert found == pytest.approx(alone, rel=1e-9)
