"""The shape that contenders train."""

from __future__ import annotations

import pytest
import torch

from phalanx.bench.shape import Llama, Shape, hugging_face, transformer
from phalanx.errors import WrongUse

SMALL = Shape(layers=2, width=64, length=16, batch=2, vocabulary=96)


def test_the_default_has_one_and_a_half_billion_weights() -> None:
    with torch.device("meta"):
        assert round(sum(w.numel() for w in transformer(Shape.default("cuda")).parameters()) / 1e9, 2) == 1.5


@pytest.mark.parametrize("experts", [0, 4])
def test_both_models_have_the_same_weights(experts: int) -> None:
    shape = SMALL.changed(experts=experts)
    own, theirs = transformer(shape), hugging_face(shape)
    assert sum(w.numel() for w in own.parameters()) == sum(w.numel() for w in theirs.parameters())


def test_a_step_has_so_many_tokens() -> None:
    task = Llama(shape=SMALL, global_batch=2)
    assert len(task.data()) == 32
    assert task.inputs({"tokens": torch.zeros(2, 17, dtype=torch.int64)}).numel() == SMALL.tokens


@pytest.mark.parametrize(("given", "told"), [
    ({"width": 96}, "multiple of 64"), ({"experts": 1}, "each token goes to 2"),
    ({"layers": 1}, "at least 2"), ({"batch": 0}, "at least 1"),
])  # fmt: skip
def test_shapes_that_cannot_be_are_refused(given: dict[str, int], told: str) -> None:
    with pytest.raises(WrongUse, match=told):
        SMALL.changed(**given)
