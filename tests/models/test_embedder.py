"""The text embedder: what it takes of a text's tokens, and that padding is none of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx import WrongUse
from phalanx.anatomy import Anatomy
from phalanx.models.embedder import Pooling, embedder, pooled

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the dev extra has it)")
SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize(("pooling", "expected"), [("mean", [2.0, 10.0]), ("cls", [1.0, 10.0]), ("last", [3.0, 10.0])])
def test_pooling_takes_what_counts(pooling: Pooling, expected: list[float]) -> None:
    hidden = torch.tensor([[1.0, 3.0, 100.0], [10.0, 100.0, 100.0]]).unsqueeze(-1)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert pooled(hidden, mask, pooling).flatten().tolist() == expected


@pytest.mark.parametrize(("kind", "name"), [("BertConfig", "bert"), ("LlamaConfig", "model")])
@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_padding_changes_nothing(kind: str, name: str, pooling: Pooling) -> None:
    torch.manual_seed(0)
    model = embedder(getattr(transformers, kind)(**SIZES), pooling).eval().double()
    assert model.body_name == name
    assert len(Anatomy.of(model).blocks) == 2
    tokens, lengths = torch.randint(1, 40, (3, 2, 5)), torch.tensor([[5, 3], [1, 2], [4, 5]])
    with torch.no_grad():
        found = model(tokens, lengths)
        longer = model(torch.nn.functional.pad(tokens, (0, 4), value=7), lengths)
        alone = model(tokens[1:2, 1:, :2], lengths[1:2, 1:])
    assert found.shape == (3, 2, 16)
    assert torch.allclose(found, longer, atol=1e-12)
    assert torch.allclose(found[1, 1], alone[0, 0], atol=1e-12)


def test_what_makes_no_vectors_of_texts_is_refused() -> None:
    with pytest.raises(WrongUse, match="of no model that makes vectors of texts"):
        embedder(transformers.PretrainedConfig(), "mean")
