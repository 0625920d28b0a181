"""Models of one's own that do what cannot be read off their names: equal to one device, or refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx
from phalanx import Layout
from tests.ranks import RankFailed, Ranks

WIDTH, HEADS, HIDDEN, WORDS = 16, 4, 24, 11


class Rows(nn.Linear):
    """A linear that is none."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class Attention(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.nhead, self.head_dim = way, HEADS, WIDTH // HEADS
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).view(*x.shape[:2], self.nhead, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.way == "own positions":
            place = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * 0.3
            q, k = q * place.cos(), k * place.cos()
        if self.way == "by hand":
            seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            out = (q @ k.transpose(-2, -1)).masked_fill(~seen, -1e9).softmax(-1) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.fc1 = nn.Linear(WIDTH, HIDDEN * (2 if way == "halves" else 1))
        self.act = nn.PReLU() if way == "learned" else nn.SiLU()
        self.fc2 = Rows(HIDDEN, WIDTH) if way == "odd row" else nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "halves":
            a, b = self.fc1(x).chunk(2, -1)
            return self.fc2(F.silu(a) * b)
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.norm1, self.mha, self.norm2 = nn.LayerNorm(WIDTH), Attention(way), nn.LayerNorm(WIDTH)
        self.mlp = FeedForward(way)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.mha(self.norm1(x))
        if self.way == "drop path" and self.training:
            branch = branch * (torch.rand(len(x), 1, 1) < 0.5)
        if self.way == "shift":
            branch = branch + F.pad(x[:, :-1], [0, 0, 1, 0])
        x = x + branch
        x = x + self.mlp(self.norm2(x))
        if self.way == "left aside":
            self.aux = x.square().mean()
        return x


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.dropout = nn.Embedding(WORDS, WIDTH), nn.Dropout(0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.tokens(tokens))


class Model(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.embeddings = Embeddings()
        self.late_dropout = nn.Dropout(0.2)
        self.blocks = nn.ModuleList(Block(way) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if way == "frozen":
            self.embeddings.requires_grad_(False)
            self.blocks[:2].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embeddings(tokens)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if self.way == "between":
                x = x * (1 + index) + 0.5
            if self.way == "drops between":
                x = F.dropout(x, 0.3, self.training)
            if self.way == "twice" and index == 3:
                x = block(x)
        logits = self.head(self.late_dropout(x))
        if self.way == "masked":
            logits.masked_fill_(torch.arange(WORDS) == 3, -5.0)
        return logits


@dataclass
class Own(phalanx.Task):
    way: str = ""
    global_batch: int = 6
    steps: int = 3
    precision: phalanx.task.Precision = "float64"
    learning_rate: float = 1e-2
    largest: int = WORDS
    tokens: Tensor = field(default_factory=lambda: torch.from_numpy(
        __import__("numpy").random.default_rng(0).integers(0, WORDS, (9, 10))
    ))  # fmt: skip

    def model(self) -> nn.Module:
        return Model(self.way)

    def data(self) -> phalanx.data.Arrays:
        return phalanx.data.Arrays(tokens=self.tokens + (self.largest - WORDS), targets=self.tokens.roll(-1, 1))

    def inputs(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["tokens"]

    def loss(self, output: Any, batch: dict[str, Tensor]) -> phalanx.Loss:
        return phalanx.losses.cross_entropy(output, batch["targets"])


def train(task: Own, layout: str) -> list[tuple[float, float]]:
    with phalanx.Engine(task, Layout.parse(layout), device="cpu") as engine:
        return [(metrics.loss, metrics.grad_norm) for metrics in map(engine.step, engine.batches())]


SAME = ["", "drop path", "between", "drops between", "masked", "frozen", "learned"]


@pytest.mark.parametrize("way", SAME)
def test_what_can_be_followed_is_equal(ranks: Ranks, way: str) -> None:
    expected = train(Own(way=way), "dp=1")
    for layout in ("tp=2", "cp=2", "cp=2,cp_kind=ulysses", "pp=2,micro_batch=2"):
        found = ranks(2, train, Own(way=way), layout)[0]
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-9), layout


@pytest.mark.parametrize(("way", "layout", "words"), [
    ("own positions", "cp=2", r"blocks\.0 gives something else under cp=2 than on one device"),
    ("by hand", "cp=2", r"blocks\.0 gives something else under cp=2|computes attention where cp=2 cannot reach it"),
    ("shift", "cp=2", r"blocks\.0 gives something else under cp=2 than on one device"),
    ("shift", "tp=2", r"blocks\.0 gives something else under tp=2 than on one device"),
    ("left aside", "pp=2", r"blocks\.0 leaves a tensor in its attribute 'aux'"),
    ("left aside", "tp=2", r"blocks\.0 leaves a tensor in its attribute 'aux'"),
    ("halves", "tp=2", r"blocks\.0\.mlp\.fc1 gives 48 features and the rows of blocks\.0\.mlp take \[24\]"),
    ("odd row", "tp=2", r"blocks\.0\.mlp\.fc2 is a Rows with a forward of its own"),
    ("twice", "pp=2", r"blocks\.3 is called out of order, so pp=2 cannot cut the model there"),
    ("twice", "tp=2", r"blocks\.3 is called out of order, so tp=2 cannot tell"),
    ("twice", "cp=2", r"blocks\.3 is called out of order, so cp=2 cannot tell"),
])  # fmt: skip
def test_what_cannot_be_followed_is_refused(ranks: Ranks, way: str, layout: str, words: str) -> None:
    with pytest.raises(RankFailed, match=words):
        ranks(2, train, Own(way=way), layout)


def test_tokens_outside_of_the_vocabulary_are_refused_as_on_one_device(ranks: Ranks) -> None:
    with pytest.raises(IndexError):
        train(Own(largest=WORDS + 2), "dp=1")
    with pytest.raises(RankFailed, match="is outside of the vocabulary of 11"):
        ranks(2, train, Own(largest=WORDS + 2), "tp=2")
