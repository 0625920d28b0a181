"""SpecAugment: the spans of a sample that are masked follow from its key, whatever else is in its micro-batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import phalanx
from phalanx.parallel.randomness.answers import Answers
from phalanx.parallel.randomness.draws import Moment, Randomness
from phalanx.parallel.randomness.masked_spans import computing

wav2vec2 = pytest.importorskip(
    "transformers.models.wav2vec2.modeling_wav2vec2", reason="transformers is not installed (the dev extra has it)"
)


def spans(step: int, slots: list[int], calls: int = 1) -> np.ndarray:
    """What is masked of samples of a step, by the function that the model calls."""
    from tests.families import FamilyTask

    randomness = Randomness(
        7, Moment(step=step, slots=np.array(slots)), torch.device("cpu"), None, FamilyTask(kind="wav2vec2").model()
    )
    randomness.answers = Answers(randomness)
    mask = torch.ones(len(slots), 40, dtype=torch.long)
    mask[:, 30:] = 0
    with randomness.scope("encoder"):
        for _ in range(calls):
            found = wav2vec2._compute_mask_indices((len(slots), 40), 0.5, 3, attention_mask=mask, min_masks=2)
    assert randomness.asked
    assert not computing
    return found


def test_a_samples_spans_do_not_depend_on_the_others() -> None:
    before = np.random.get_state()[1].copy()
    whole = spans(3, [0, 1, 2, 3])
    assert whole.shape == (4, 40)
    assert whole.any(1).all()
    assert not whole[:, 30:].any(), "padding is not masked"
    assert (np.random.get_state()[1] == before).all()
    assert (np.concatenate([spans(3, [0]), spans(3, [1, 2]), spans(3, [3])]) == whole).all()
    assert (spans(3, [3, 1]) == whole[[3, 1]]).all()
    assert (whole[0] != whole[1]).any()
    assert (spans(4, [0, 1, 2, 3]) != whole).any()
    assert (spans(3, [0, 1, 2, 3], calls=2) != whole).any()


def test_elsewhere_it_is_their_own_function() -> None:
    spans(0, [0])
    np.random.seed(1)
    first = wav2vec2._compute_mask_indices((2, 40), 0.5, 3)
    np.random.seed(1)
    assert (wav2vec2._compute_mask_indices((2, 40), 0.5, 3) == first).all()


def losses(layout: str) -> list[float]:
    from tests.families import FamilyTask

    with phalanx.Engine(FamilyTask(kind="wav2vec2", steps=3), layout, device="cpu") as engine:
        return [engine.step(batch).loss for batch in engine.batches()]


def test_micro_batches_train_alike() -> None:
    assert losses("micro_batch=3") == pytest.approx(losses("dp=1"), rel=1e-5)
