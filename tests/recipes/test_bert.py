"""The recipe `bert`: which tokens are hidden follows from the sample alone, and they are told by both sides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import phalanx
from phalanx.data.seeding import sample_at
from phalanx.recipes.bert import Bert, Masked
from tests.recipes.test_corpus import text


class Packed:
    """Samples of ids from 0 to 99, the last tenth of each padding."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(1000) * (index + 3) % 100
        return {"tokens": tokens, "documents": torch.where(torch.arange(1000) < 900, 0, -1)}


def test_tokens_are_hidden_replaced_and_kept_by_sample_and_epoch() -> None:
    data, plain = Masked(Packed(), mask=100, vocabulary=100, share=0.15, kept=7), Packed()
    chosen = hidden = same = 0
    for index in range(50):
        sample, tokens = sample_at(data, index, seed=1), plain[index]["tokens"]
        at = sample["targets"] != -100
        assert torch.equal(sample["targets"][at], tokens[at])
        assert torch.equal(sample["tokens"][~at], tokens[~at])
        assert not at[900:].any()
        assert not (tokens[at] == 7).any()
        chosen += int(at.sum())
        hidden += int((sample["tokens"][at] == 100).sum())
        same += int((sample["tokens"][at] == tokens[at]).sum())
    assert chosen / (50 * 900) == pytest.approx(0.15, abs=0.01)
    assert hidden / chosen == pytest.approx(0.8, abs=0.02)
    assert same / chosen == pytest.approx(0.1, abs=0.02)
    again, other = sample_at(data, 3, seed=1), sample_at(data, 3, seed=1, visit=1)
    assert torch.equal(again["tokens"], sample_at(data, 3, seed=1)["tokens"])
    assert not torch.equal(again["tokens"], other["tokens"])


def test_it_tells_hidden_letters_from_both_sides(tmp_path: Path) -> None:
    """In this text every letter follows from its neighbours; the most frequent alone is one in ten."""
    source = text(tmp_path / "one.txt", "abcdefghijkl", 1000)
    task = Bert(sources=(str(source),), tokenizer="bytes", cache=str(tmp_path / "cache"), width=32, layers=2, heads=2,
                length=32, global_batch=16, steps=120, learning_rate=1e-2, warmup_steps=10)  # fmt: skip
    assert task.model().embedding.num_embeddings == 257
    with phalanx.Engine(task, device="cpu") as engine:
        losses = [engine.step(batch).loss for batch in engine.batches()]
        found = engine.evaluate()
        assert found == engine.evaluate(), "held-out tokens are hidden alike each time"
    assert losses[0] > 5
    assert found["accuracy"] > 0.6
    assert np.isfinite(found["loss"])


def test_a_configuration_of_hugging_face_is_trained(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="no transformers (pip install 'phalanx[hf]')")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    transformers.BertConfig(vocab_size=257, max_position_embeddings=32, **sizes).save_pretrained(tmp_path / "config")
    source = text(tmp_path / "one.txt", "abcdefgh")
    task = Bert(sources=(str(source),), tokenizer="bytes", cache=str(tmp_path / "cache"), length=32, global_batch=4,
                config=str(tmp_path / "config"), steps=2)  # fmt: skip
    with phalanx.Engine(task, device="cpu") as engine:
        assert all(np.isfinite(engine.step(batch).loss) for batch in engine.batches())
        assert {"loss", "accuracy"} == set(engine.evaluate())


def test_a_share_that_is_none_is_refused() -> None:
    with pytest.raises(phalanx.WrongUse, match=r"masked=1.0 is no share"):
        Bert(masked=1.0).check()
