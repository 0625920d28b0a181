"""The transformer against formulae and against Hugging Face's Llama."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from phalanx import WrongUse
from phalanx.models.transformer import Transformer, TransformerConfig


def test_it_computes_what_hugging_faces_llama_computes() -> None:
    config = TransformerConfig(vocabulary=31, width=24, layers=2, heads=4, kv_heads=2, hidden=40, tied=False)
    ours = Transformer(config).double()
    theirs = LlamaForCausalLM(LlamaConfig(
        vocab_size=31, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=40, rms_norm_eps=1e-5, rope_theta=10_000.0, tie_word_embeddings=False,
    )).double()  # fmt: skip
    renamed = {
        "embedding": "model.embed_tokens", "blocks": "model.layers", "norm": "model.norm", "head": "lm_head",
        "attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm",
        "attention": "self_attn", "feed_forward": "mlp",
    }  # fmt: skip
    state = {}
    for name, tensor in ours.state_dict().items():
        parts = name.split(".")
        state[".".join(renamed.get(part, part) for part in parts)] = tensor
    theirs.load_state_dict(state)
    tokens = torch.randint(0, 31, (2, 9), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(ours(tokens).tensor(), theirs(tokens).logits, rtol=1e-4, atol=1e-6)


def test_packed_documents_do_not_see_each_other() -> None:
    model = Transformer(TransformerConfig(width=16, layers=2, heads=2)).double()
    first, second = torch.randint(0, 256, (1, 5)), torch.randint(0, 256, (1, 4))
    apart = torch.cat([model(first).tensor(), model(second).tensor()], dim=1)
    packed = model(
        torch.cat([first, second], dim=1),
        positions=torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]]),
        documents=torch.tensor([[0] * 5 + [1] * 4]),
    ).tensor()
    assert torch.allclose(packed, apart, rtol=1e-6, atol=1e-9)


def test_a_document_may_go_on_after_another_one() -> None:
    """That is no document laid in one piece, and is kept apart by a mask."""
    model = Transformer(TransformerConfig(width=16, layers=2, heads=2)).double()
    tokens = torch.randint(0, 256, (1, 6))
    other = tokens.clone()
    other[0, 2] += 1 - 2 * (other[0, 2] > 9)
    one, two = (model(each, documents=torch.tensor([[0, 0, 1, 1, 0, 0]])).tensor() for each in (tokens, other))
    changed = (one - two).abs().amax(-1)[0] > 0
    assert changed.tolist() == [False, False, True, True, False, False]


@pytest.mark.parametrize("wrong", [{"width": 10, "heads": 4}, {"width": 12, "heads": 4}, {"heads": 4, "kv_heads": 3}])
def test_sizes_that_do_not_fit_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(WrongUse, match="Make "):
        TransformerConfig(**wrong)
