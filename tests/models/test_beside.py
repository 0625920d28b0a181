"""A frozen model beside another one."""

from __future__ import annotations

import pytest
import torch

from phalanx.models.beside import anatomy_beside, beside_names, put_beside
from phalanx.models.hugging_face import language_model

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the dev extra has it)")


def llama(width: int, blocks: int) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=blocks, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    return language_model(config, "causal")


def test_both_are_called_and_one_is_trained() -> None:
    torch.manual_seed(0)
    model, other = llama(8, 2), llama(16, 3)
    tokens = torch.randint(32, (2, 5))
    alone = [each(input_ids=tokens).logits for each in (model, other)]
    assert beside_names(model) == ()
    put_beside(model, "teacher", other)
    output = model(input_ids=tokens)
    assert torch.equal(output["logits"], alone[0])
    assert torch.equal(output["teacher"], alone[1])
    assert output["logits"].requires_grad
    assert not output["teacher"].requires_grad
    assert beside_names(model) == ("teacher",)
    assert not any(w.requires_grad for n, w in model.named_parameters() if n.startswith("teacher."))


def test_blocks_of_each_are_a_chain_of_their_own() -> None:
    model = llama(8, 2)
    put_beside(model, "teacher", llama(16, 3))
    anatomy = anatomy_beside(model, "teacher")
    assert anatomy.blocks == (
        "model.layers.0", "model.layers.1", *(f"teacher.model.layers.{number}" for number in range(3)),
    )  # fmt: skip
    assert anatomy.chain("model.layers.1") == ("model.layers.0", "model.layers.1")
    assert anatomy.chain("teacher.model.layers.1")[-1] == "teacher.model.layers.2"
    assert anatomy.in_line
    assert not anatomy.cuts
    for name, split in (("q_proj", "column"), ("o_proj", "row")):
        assert anatomy.splits[f"model.layers.0.self_attn.{name}"] == split
        assert anatomy.splits[f"teacher.model.layers.2.self_attn.{name}"] == split
    assert anatomy.splits["lm_head"] == anatomy.splits["teacher.lm_head"] == "vocabulary"
    assert list(dict(model.named_children()))[-1] == "teacher"
