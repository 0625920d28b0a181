"""Heads of others' models give lazy logits on one rank too."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import phalanx
from phalanx import Logits
from phalanx.anatomy import Anatomy
from phalanx.parallel.forward.lazy_heads import make_heads_lazy


def test_a_hugging_face_models_logits_are_lazy_and_right() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (the dev extra has it)")
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).double()
    tokens = torch.arange(14).view(2, 7) * 3 % 61
    want = model(input_ids=tokens, labels=tokens)
    want.loss.backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    make_heads_lazy(model, Anatomy.of(model))
    found = model(input_ids=tokens, labels=tokens)
    assert isinstance(found.logits, Logits)
    assert found.logits.lazy
    found.loss.double().backward()
    assert torch.allclose(found.loss.double(), want.loss.double(), rtol=1e-6)
    for name, weight in model.named_parameters():
        assert torch.allclose(weight.grad, gradients[name], rtol=1e-4, atol=1e-7), name
    assert torch.equal(found.logits.tensor(), want.logits)


def test_other_heads_are_left_alone() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    make_heads_lazy(model, Anatomy.of(model))
    assert isinstance(model(torch.ones(2, 4)), torch.Tensor)
    assert phalanx.Logits is Logits


class Headed(nn.Module):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.head = nn.Linear(4, 5)
        if own:
            self.head.forward = lambda x: x  # type: ignore[method-assign]


def test_a_head_keeps_a_forward_of_its_own() -> None:
    anatomy = SimpleNamespace(after=["head"], splits={"head": "vocabulary"})
    x = torch.ones(2, 4)
    own, plain = Headed(own=True), Headed(own=False)
    for model in (own, plain):
        make_heads_lazy(model, anatomy)  # type: ignore[arg-type]
    assert own.head(x) is x
    assert isinstance(plain.head(input=x), Logits)
    with torch.autocast("cpu", torch.bfloat16):
        found = plain.head(x)
    assert found.dtype == torch.bfloat16
    assert isinstance(found, torch.Tensor)
