"""Tasks in which a stage, a rank or a step has none of something: no experts, no attention, nothing to train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx
from phalanx.anatomy import Anatomy
from phalanx.models.experts import Experts, Router

WIDTH, WORDS = 16, 29


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.feed_forward = FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed_forward(self.norm(x))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x)))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x)


class Attention(nn.Module):
    head_dim = 4

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        split = (proj(x).unflatten(-1, (-1, 4)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(F.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = Router(WIDTH, 4, 2, None, 0.01, 0.001)
        self.experts = Experts(4, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden, chosen, shares = (each.flatten(0, 1) for each in self.router(self.norm(x)))
        return x + self.experts(hidden, chosen, shares).view_as(x)


class Scale(nn.Module):
    """A block with nothing to cut."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + x.tanh() * self.scale


class Bare(nn.Module):
    """A block without a weight."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.tanh()


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def frozen(model: nn.Module, *names: str) -> nn.Module:
    for name, weight in model.named_parameters():
        weight.requires_grad_(not name.startswith(names))
    return model


def with_an_unused_norm() -> nn.Module:
    model = Model(Dense(), Dense())
    model.blocks[1].spare = nn.BatchNorm1d(WIDTH)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "experts in the last block": lambda: Model(Dense(), Sparse()),
    "experts in the first block": lambda: Model(Sparse(), Dense()),
    "attention in the first block": lambda: Model(Attending(), Dense()),
    "attention in the last block": lambda: Model(Dense(), Attending()),
    "no attention": lambda: Model(Dense(), Dense()),
    "nothing to cut in the last blocks": lambda: Model(Dense(), Scale(), Scale()),
    "nothing to cut in the first blocks": lambda: Model(Scale(), Scale(), Dense()),
    "no weights in blocks": lambda: Model(Bare(), Bare()),
    "nothing to train on the first stage": lambda: frozen(Model(Dense(), Dense()), "embedding", "blocks.0"),
    "nothing to train on the last stage": lambda: frozen(Model(Dense(), Dense()), "head", "blocks.1"),
    "nothing to train in blocks": lambda: frozen(Model(Dense(), Dense()), "blocks"),
    "a norm that is never called": with_an_unused_norm,
}


@dataclass
class Lacking(phalanx.Task):
    global_batch: int = 16
    without: str = ""

    def model(self) -> nn.Module:
        return MODELS[self.without]()

    def anatomy(self, model: nn.Module) -> Anatomy:
        return Anatomy.of(model, blocks="blocks.*", cuts="blocks.*")

    def data(self) -> Any:
        draw = torch.Generator().manual_seed
        return [{"ids": torch.randint(0, WORDS, (9,), generator=draw(index))} for index in range(40)]

    def inputs(self, batch: dict[str, Any]) -> Tensor:
        return batch["ids"]

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        return phalanx.losses.cross_entropy(output, batch["ids"], dim=-1)
