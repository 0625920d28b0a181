"""Hostile tasks whose loss compares samples: with all of the global batch, in every way that it can."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx
from tests.parity import HostileLanguage, HostileTransformer, Mixture


class Embedding(HostileTransformer):
    """Two embeddings of each sample, the mean of its first tokens, and a weight as it is."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, tokens: Tensor, **options: Any) -> dict[str, Any]:
        hidden = super().forward(tokens, **options).hidden
        return {"views": (hidden[:, 0], hidden[:, 2]), "mean": hidden[:, :3].mean(1), "scale": self.scale}


class Comparing:
    """A contrastive loss with class weights from the global batch, centred by a mean that was gathered itself."""

    def loss(self, output: dict[str, Any], batch: dict[str, Tensor]) -> phalanx.Loss:
        one, two = (F.normalize(view, dim=-1) for view in output["views"])
        own, classes = phalanx.rows(one), batch["tokens"][:, 0] % 5
        every = phalanx.gather(classes)
        weights = len(every) / torch.bincount(every, minlength=5).to(one.dtype)[classes]
        centred = one - phalanx.gather(one).mean(0)
        centred = F.dropout(centred, 0.1)
        scores = output["scale"] * centred @ phalanx.gather(two).T, 2 * two @ phalanx.gather(centred).T
        losses = sum(F.cross_entropy(each, own, reduction="none") for each in scores)
        assert len(every) >= len(own)
        return phalanx.Loss((weights * losses).sum() + output["mean"].square().sum(), len(own))


@dataclass
class Contrast(Comparing, HostileLanguage):
    samples: int = 33

    def model(self) -> nn.Module:
        return Embedding(self.layers, self.heads, self.kv_heads)


@dataclass
class ContrastOfExperts(Comparing, Mixture):
    samples: int = 33

    def model(self) -> nn.Module:
        return Embedding(self.layers, self.heads, self.kv_heads, experts=8, balance=0.5, flatness=0.1, experts_chosen=2)


class Headed(HostileTransformer):
    """All logits, as a tensor."""

    def forward(self, tokens: Tensor, **options: Any) -> Tensor:
        return super().forward(tokens, **options).tensor()


@dataclass
class Named(HostileLanguage):
    """Three losses with counts of their own; of the third, most micro-batches have no term."""

    samples: int = 33
    even: bool = False

    def model(self) -> nn.Module:
        return Headed(self.layers, self.heads, self.kv_heads)

    def terms(self, output: Tensor, batch: dict[str, Tensor]) -> dict[str, phalanx.Loss]:
        first = phalanx.losses.mean_squared_error(output[:, 0, :3], batch["tokens"][:, :1].expand(-1, 3) / 10)
        rare = batch["targets"].where((batch["tokens"][:, :1] % 11 == 3) & (batch["targets"] > 9), -100)
        found = {"token": phalanx.losses.cross_entropy(output, batch["targets"], dim=-1), "first": first}
        found["rare"] = phalanx.losses.cross_entropy(output, rare, dim=-1)
        if self.even:
            found = {name: phalanx.Loss(loss.total, len(output)) for name, loss in found.items()}
        return found

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> phalanx.Loss:
        terms = self.terms(output, batch)
        return phalanx.losses.sum(token=terms["token"], first=0.3 * terms["first"], rare=terms["rare"] * 2)


@dataclass
class ByHand(Named):
    """The same objective on one device, written down."""

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> phalanx.Loss:
        terms = self.terms(output, batch)
        mean = {name: loss.total / max(1, int(loss.count)) for name, loss in terms.items()}
        return phalanx.Loss(mean["token"] + 0.3 * mean["first"] + 2 * mean["rare"], 1)
