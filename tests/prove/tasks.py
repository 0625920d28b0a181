"""Small tasks that a proof must judge rightly."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx


class Points:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        source = torch.Generator().manual_seed(index)
        return {"x": torch.randn(6, generator=source), "y": index % 3}


@dataclass
class Plain(phalanx.Task):
    """A classifier of a few weights."""

    global_batch: int = 16
    width: int = 8

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, self.width), nn.Tanh(), nn.Linear(self.width, 3))

    def data(self) -> Any:
        return Points()

    def inputs(self, batch: dict[str, Any]) -> Any:
        return batch["x"]

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        return phalanx.losses.cross_entropy(output, batch["y"])


@dataclass
class Averaging(Plain):
    """Gives a mean where a sum is asked for."""

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        return phalanx.Loss(F.cross_entropy(output, batch["y"]), 1)


@dataclass
class Contrastive(Plain):
    """Compares each sample with all of the global batch; ``own`` says what it counts."""

    own: bool = True

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        every = phalanx.gather(F.normalize(output, dim=-1))
        rows = phalanx.rows(output) if self.own else torch.arange(len(every))
        scores = every[rows] @ every.T
        return phalanx.Loss(F.cross_entropy(scores, rows, reduction="sum"), len(rows))


@dataclass
class ContrastiveNorm(Contrastive):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, self.width), nn.BatchNorm1d(self.width), nn.Linear(self.width, 3))


@dataclass
class Several(Plain):
    """Two losses, of which one has so many times the terms."""

    terms: int = 2

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        one = phalanx.Loss(output.square().sum(), self.terms * len(output))
        return phalanx.losses.sum(one=one, other=phalanx.Loss(output.abs().sum(), len(output)))


class Moody(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + random.SystemRandom().random())


@dataclass
class Undecided(Plain):
    """Computes something else every time."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 3), Moody())


class Counting(nn.Module):
    """Changes from call to call, in a way that no seed shows."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


@dataclass
class Counts(Plain):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 3), Counting())


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


@dataclass
class Mixes(Plain):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), Centred(), nn.Linear(8, 3))


class Chaotic(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x.sigmoid()
        for _ in range(24):
            x = 3.99 * x * (1 - x)
        return x


@dataclass
class Sensitive(Plain):
    """Makes much of little, and so of rounding."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 3), Chaotic())


class Partial(nn.Module):
    """Not the same on every rank."""

    def forward(self, x: Tensor) -> Tensor:
        import torch.distributed as dist

        return x * (1 + 0.01 * (dist.get_rank() if dist.is_initialized() else 0))


@dataclass
class LooksAtRank(Plain):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 3), Partial())


@dataclass
class Narrow(Plain):
    """Casts to float32 in the middle."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 3), Casting())


class Casting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float().softmax(-1).to(x.dtype) + F.softmax(x, -1, dtype=torch.float32).type_as(x)


@dataclass
class RankInData(Plain):
    """Data that is another on another rank."""

    def data(self) -> Any:
        points, shift = Points(), float(os.environ.get("RANK", 0))

        class Shifted(Points):
            def __getitem__(self, index: int) -> dict[str, Any]:
                sample = points[index]
                return sample | {"x": sample["x"] + shift}

        return Shifted()


class Scaled(nn.Module):
    """A scalar weight, and a buffer that counts calls."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.temperature = nn.Parameter(torch.tensor(0.0))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * self.temperature.exp()


@dataclass
class Odd(Plain):
    """Weighted samples, numbers and arrays beside tensors, an optimizer with little state."""

    def model(self) -> nn.Module:
        return Scaled()

    def data(self) -> Any:
        return [Points()[i] | {"weight": 1 + i % 3 / 4, "name": i} for i in range(40)]

    def collate(self, samples: Any) -> dict[str, Any]:
        assert all(type(s["name"]) is int for s in samples)
        return super().collate(samples)

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        terms = F.cross_entropy(output, batch["y"], reduction="none") * batch["weight"]
        return phalanx.Loss(terms.sum(), batch["weight"].sum())

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)


@dataclass
class Tabular(Plain):
    """More numbers in a sample than a sequence may have."""

    def model(self) -> nn.Module:
        return nn.Linear(90, 3)

    def data(self) -> Any:
        return [{"x": torch.randn(90, generator=torch.Generator().manual_seed(i)), "y": i % 3} for i in range(40)]


@dataclass
class Normed(Plain):
    """A bias in front of a batch-norm, whose gradient is rounding alone."""

    learning_rate: float = 1e-2

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


@dataclass
class Broken(Plain):
    def inputs(self, batch: dict[str, Any]) -> Any:
        return batch["x"].reshape(-1, 5)


class Slowing(torch.optim.SGD):
    """Counts its updates where nobody looks."""

    _updates = 0

    def step(self, closure: Any = None) -> Any:
        self._updates += 1
        for group in self.param_groups:
            group["lr"] /= self._updates
        return super().step(closure)


@dataclass
class Forgets(Plain):
    """Depends on something that no checkpoint has."""

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return Slowing(params, lr=0.1)
