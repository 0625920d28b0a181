"""Tokens that are made with kept keys are those that whole forwards give."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx.key_values import KeyValues
from phalanx.models.transformer import Attention, Transformer, TransformerConfig
from phalanx.questions import Question, Questions
from phalanx.recipes.sft import SFT
from phalanx.train.next_tokens import NextTokens
from tests.ranks import Ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the dev extra has it)")

LENGTHS, LENGTH, MOST = (2, 11, 5, 7), 20, 9
"""Of prompts; of a prompt and its answer: the longest one comes to its end before the others."""


def short_rows() -> list[dict[str, Tensor]]:
    place = torch.arange(8)
    same = {"positions": place, "documents": 0 * place}
    return [{"tokens": place + i, "targets": place + i + 1, **same} for i in range(8)]


@dataclass
class Tuned(SFT):
    """Models of Hugging Face's that keep keys in different ways: learned positions, a window, fewer heads of keys."""

    kind: str = "llama"
    precision: Any = "float64"
    steps: int = 0

    def tiny_config(self) -> Any:
        sizes = {"vocab_size": len(self._tokenizer), "bos_token_id": None, "eos_token_id": None}
        if self.kind == "gpt2":
            return transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=LENGTH, **sizes)
        sizes |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2, "max_position_embeddings": LENGTH, "initializer_range": 0.3}
        if self.kind == "mistral":
            return transformers.MistralConfig(sliding_window=4, head_dim=8, **sizes)
        return transformers.LlamaConfig(**sizes)

    def __post_init__(self) -> None:
        self.packed = self.kind == "llama"

    def data(self) -> Any:
        return short_rows()

    def held_out(self) -> None:
        return None


@dataclass
class Own(phalanx.Task):
    """Our own transformer."""

    experts: int = 0
    capacity: float | None = None
    deaf: bool = False
    plain: bool = False
    precision: Any = "float64"
    global_batch: int = 4
    steps: int = 0

    def model(self) -> nn.Module:
        config = TransformerConfig(
            vocabulary=64, width=32, layers=2, heads=4, kv_heads=2, experts=self.experts, capacity=self.capacity
        )
        model = (Deaf if self.deaf else Transformer)(config)
        for block in model.blocks if self.plain else ():
            block.attention = PlainAttention(config)
        for weight in model.parameters():  # such that what was said before is felt
            nn.init.normal_(weight, std=0.3) if weight.ndim > 1 else None
        return model

    def data(self) -> Any:
        return short_rows()

    def inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": batch["tokens"], "positions": batch["positions"], "documents": batch["documents"]}

    def loss(self, output: Any, batch: dict[str, Any]) -> phalanx.Loss:
        return phalanx.losses.cross_entropy(output, batch["tokens"])


class Deaf(Transformer):
    """Takes keys, and does not look at them."""

    def forward(  # type: ignore[override]
        self, tokens: Tensor, positions: Tensor, documents: Tensor, key_values: KeyValues | None = None
    ) -> Any:
        return super().forward(tokens, positions, documents)


class PlainAttention(Attention):
    """As people wrote theirs before keys were kept."""

    def forward(self, x: Tensor, rotation: Any, mask: Tensor | None) -> Tensor:  # type: ignore[override]
        return super().forward(x, rotation, mask)


def asked(words: int = 60) -> Questions:
    every = [Question([(7 * i + 5 * n) % words for i in range(n)], "", "") for n in LENGTHS]
    return Questions(every, str, frozenset(), LENGTH)


@torch.no_grad()
def grown(engine: phalanx.Engine, whole: bool) -> tuple[list[list[int]], Tensor | None, str]:
    """Rows as they grow, what comes after them, and why no keys are kept."""
    questions = asked()
    engine.spread.model.eval()
    index, size = engine.mesh.index("dp", "fsdp"), engine.mesh.size("dp", "fsdp")
    next_tokens = NextTokens(engine, questions, questions.every)
    if whole:
        next_tokens.why = "asked for"
    rows = [list(question.tokens) for question in questions.every[index::size]]
    for _ in range(MOST):
        grow = zip(rows, next_tokens(rows), strict=True)
        rows = [row if len(row) == LENGTH else [*row, token] for row, token in grow]
    if next_tokens.why:
        return rows, next_tokens._whole(rows), next_tokens.why
    assert next_tokens.kept is not None
    return rows, next_tokens.kept.longer(rows), ""


def both(task: phalanx.Task, layout: str) -> set[int]:
    """What was said, with kept keys as without."""
    with phalanx.Engine(task, layout, device="cpu") as engine:
        (rows, logits, why), (expected, known, _) = (grown(engine, whole) for whole in (False, True))
    assert not why, why
    assert rows == expected
    growing = [number for number, row in enumerate(rows) if len(row) < LENGTH]
    assert logits is not None
    assert known is not None
    torch.testing.assert_close(logits[growing], known[growing], rtol=1e-9, atol=1e-9)
    return {token for row in rows for token in row[-MOST:]}


TASKS = {
    **{kind: Tuned(kind=kind) for kind in ("llama", "gpt2", "mistral")},
    "own": Own(),
    "experts": Own(experts=4),
}
QUICK = {("experts", "fsdp=4,ep=2"), ("llama", "fsdp=2,tp=2")}
LAYOUTS = ("dp=2,fsdp=2", "fsdp=2,tp=2", "tp=2,fsdp=2,zero=2", "fsdp=4,ep=2")


@pytest.mark.parametrize("kind", TASKS)
def test_tokens_are_those_of_whole_forwards(kind: str) -> None:
    assert len(both(TASKS[kind], "dp=1")) > 2  # nobody could guess them


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=[] if (kind, layout) in QUICK else pytest.mark.every)
        for kind in TASKS
        for layout in LAYOUTS
        if kind == "experts" or "ep" not in layout
    ],
)
def test_tokens_of_any_layout_are_those_of_whole_forwards(ranks: Ranks, kind: str, layout: str) -> None:
    assert len(set.union(*ranks(4, both, TASKS[kind], layout))) > 2


@pytest.mark.parametrize(
    ("task", "why"),
    [
        (Own(deaf=True), "something else with them"),
        (Own(experts=4, capacity=1.0), "capacity"),
        (Own(plain=True), "forward of PlainAttention does not take key_values"),
    ],
)
def test_where_keys_cannot_be_kept_it_is_said(task: phalanx.Task, why: str) -> None:
    with phalanx.Engine(task, device="cpu") as engine:
        with pytest.warns(UserWarning, match="a whole forward for each token: .*" + re.escape(why)):
            rows, _, told = grown(engine, whole=False)
        assert why in told
        assert rows == grown(engine, whole=True)[0]


def refused(layout: str, why: str) -> None:
    with phalanx.Engine(Own(), layout, device="cpu") as engine:
        assert NextTokens(engine, asked(), []).why == why


def test_layouts_that_keep_none_say_so(ranks: Ranks) -> None:
    for layout, axes in (("pp=2", "pp=2"), ("cp=2,compile=blocks", "cp=2,compile=blocks")):
        ranks(2, refused, layout, f"under {axes} none are kept")


@torch.no_grad()
def test_each_token_is_computed_once() -> None:
    question = Question(list(range(5)), "", "")
    with phalanx.Engine(Own(), device="cpu") as engine:
        counted: list[int] = []
        engine.model.embedding.register_forward_hook(lambda module, args, out: counted.append(args[0].numel()))
        computed = {}
        for tokens in (16, 32, 64):
            next_tokens = NextTokens(engine, Questions([question], str, frozenset(), 5 + tokens), [question])
            next_tokens([list(question.tokens)])  # and whether they can be kept is tried
            next_tokens.begin()
            counted.clear()
            row = list(question.tokens)
            for _ in range(tokens):
                row += next_tokens([row])
            computed[tokens] = sum(counted)
    assert computed == {tokens: len(question.tokens) + tokens - 1 for tokens in computed}
