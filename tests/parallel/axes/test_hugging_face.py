"""Hugging Face's causal language models, unmodified, on every axis and every two of them."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import nn

from phalanx import Layout
from phalanx.parallel.axes import hugging_face
from phalanx.parallel.randomness.draws import Randomness
from phalanx.prove.reference.activations import round_activations
from tests.hugging_face import CausalLanguageModel
from tests.parity import TOLERANCE, Trace, difference, reference, spread_run
from tests.ranks import RankFailed, Ranks

DENSE = ("llama", "qwen2", "qwen3", "gpt2", "mistral", "gemma2", "gpt-neox")
AXES = ("dp=2", "fsdp=2", "tp=2", "cp=2", "pp=2,micro_batch=6")
PAIRS = [",".join(pair) for pair in itertools.combinations(AXES, 2)]
KINDS = ["cp=2,cp_kind=ulysses,tp=2", "fsdp=2,pp=2,schedule=zb,micro_batch=6", "tp=4"]
EXPERTS = [
    "fsdp=2,tp=2,ep=2",
    "fsdp=4,ep=4,zero=2",
    "fsdp=2,cp=2,ep=2",
    "cp=2,pp=2,ep=2,micro_batch=6",
    "dp=2,fsdp=2,ep=2",
]


def run_all(kind: str, layouts: list[str]) -> list[Trace]:
    return [spread_run(CausalLanguageModel(kind=kind, steps=2), Layout.parse(layout)) for layout in layouts]


@functools.cache
def one_device(kind: str, micro_batches: int) -> Trace:
    return reference(CausalLanguageModel(kind=kind, steps=2), micro_batches)


def compare(ranks: Ranks, world: int, kind: str, layouts: list[str]) -> None:
    wrong = []
    for layout, trace in zip(layouts, ranks(world, run_all, kind, layouts)[0], strict=True):
        micro_batches = Layout.parse(layout).micro_batches(CausalLanguageModel.global_batch)
        error, where = difference(trace, one_device(kind, micro_batches))
        if not error < TOLERANCE:
            wrong.append(f"{layout}: {error:.1e} in {where}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", [*DENSE, "mixtral"])
def test_each_axis(ranks: Ranks, kind: str) -> None:
    compare(ranks, 2, kind, [*AXES, *(["fsdp=2,ep=2"] if kind == "mixtral" else [])])


@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=[] if kind in ("gpt2", "mixtral") else [pytest.mark.every])
    for kind in [*DENSE, "mixtral"]
])  # fmt: skip
def test_every_two_axes(ranks: Ranks, kind: str) -> None:
    compare(ranks, 4, kind, [*PAIRS, *(EXPERTS if kind == "mixtral" else KINDS)])


@pytest.mark.parametrize(("kind", "layout"), [
    ("phi3", "tp=2,cp=2"),  # fused, and cut by its configuration's heads
    ("falcon", "tp=2,cp=2"),  # one key-value head between all, attention by torch's own function
    ("gpt-oss", "tp=2,cp=2,cp_kind=ulysses"),  # a sink for each head
    ("olmoe", "fsdp=2,tp=2"),  # norms over all heads
    ("bigcode", "tp=2,cp=2"),  # likewise, with dropout in attention
    ("bloom", "tp=2,pp=2,micro_batch=6,recompute=full"),  # biases built for all heads
])  # fmt: skip
def test_attention_of_other_kinds(ranks: Ranks, kind: str, layout: str) -> None:
    compare(ranks, 4, kind, [layout])


@pytest.mark.parametrize(("kind", "layout"), [
    ("llama", "tp=2,cp=2,activations=bf16"),
    ("gpt2", "tp=2,cp=2,cp_kind=ulysses,activations=fp8"),
    ("qwen3", "cp=4,activations=fp8"),
    ("gemma2", "cp=2,tp=2,activations=fp8"),
    ("gpt-neox", "tp=4,activations=fp8"),
    ("mixtral", "tp=2,cp=2,activations=bf16"),
    ("falcon", "tp=2,cp=2,activations=fp8"),
    ("gpt-oss", "tp=2,cp=2,cp_kind=ulysses,activations=fp8"),
    ("olmoe", "tp=2,cp=2,activations=fp8"),  # of gathered columns, keys and values alone
    ("bigcode", "tp=2,cp=2,activations=bf16"),
])  # fmt: skip
def test_in_fewer_bits(ranks: Ranks, kind: str, layout: str) -> None:
    task, spread = CausalLanguageModel(kind=kind, steps=2), Layout.parse(layout)

    def rounds(model: nn.Module, randomness: Randomness) -> None:
        hugging_face.prepare(model, torch.float64)  # a layer is called once for each rank, and must not keep its keys
        round_activations(task, spread, model, randomness)

    expected = reference(task, spread.micro_batches(task.global_batch), observe=rounds)
    error, where = difference(ranks(4, run_all, kind, [layout])[0][0], expected)
    assert error < TOLERANCE, where
    assert difference(one_device(kind, 1), expected)[0] > 1e-4


@pytest.mark.parametrize(("kind", "layout", "words"), [
    ("bloom", "cp=2", "BloomForCausalLM writes attention out by hand, where cp=2 cannot reach it"),
    ("llama", "pp=4", "pp=4 makes 4 stages, and LlamaForCausalLM can be cut into 2 at most"),
    ("llama", "fsdp=2,ep=2", "ep=2 finds no experts in LlamaForCausalLM"),
    ("llama", "tp=8", "has 4 heads, which do not divide by tp=8"),
    ("llama", "cp=8,cp_kind=ulysses", "has 4 heads on each rank, which do not divide by cp=8"),
])  # fmt: skip
def test_what_cannot_be_is_refused(ranks: Ranks, kind: str, layout: str, words: str) -> None:
    parsed = Layout.parse(layout)
    with pytest.raises(RankFailed, match=words):
        ranks(parsed.world, spread_run, CausalLanguageModel(kind=kind), parsed)
