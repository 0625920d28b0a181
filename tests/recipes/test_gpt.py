"""The recipe `gpt`: text that ships with Python, held-out files apart, and a loss that falls."""

from __future__ import annotations

import numpy as np
import pytest

import phalanx
from phalanx.recipes.gpt import GPT

SMALL = {"width": 32, "layers": 2, "heads": 2, "kv_heads": 1, "length": 32, "megabytes": 0.2, "global_batch": 16}


def test_training_and_held_out_text_are_apart() -> None:
    task = GPT(megabytes=0.5)
    train, held = task.data(), task.held_out()
    assert len(train) > len(held) > 10
    held_bytes, train_bytes = bytes(held.tokens), bytes(train.tokens)
    assert held_bytes[:2000] not in train_bytes
    assert held_bytes[:2000] in bytes(task._text[0])
    assert b"import" in bytes(train.tokens[:5000])
    assert set(train[0]) == {"tokens", "targets", "documents", "positions"}


def test_too_little_text_is_refused() -> None:
    with pytest.raises(phalanx.WrongUse, match="Set it higher"):
        GPT(megabytes=1e-4).data()


def test_it_learns_more_than_letter_frequencies() -> None:
    """Whatever text this Python ships with."""
    task = GPT(steps=130, **SMALL)
    seen, held = (np.bincount(split.tokens, minlength=256) for split in (task.data(), task.held_out()))
    frequencies = np.log((seen + 1) / (seen + 1).sum())
    with phalanx.Engine(task, device="cpu") as engine:
        losses = [engine.step(batch).loss for batch in engine.batches()]
        assert losses[0] > 5
        assert losses[-1] < -np.average(frequencies, weights=seen)
        assert engine.evaluate()["loss"] < -np.average(frequencies, weights=held)
