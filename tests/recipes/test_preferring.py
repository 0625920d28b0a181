"""Samples of preferences: some held out, two sequences each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import phalanx
from phalanx.data.row_file import RowFile
from phalanx.recipes.dpo import DPO
from phalanx.recipes.preferring import PREFERENCES
from phalanx.recipes.reward import Reward

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
