"""Models that break sharding libraries: each trains like one device, under every way of keeping its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import phalanx
from phalanx import Layout
from phalanx.parallel.communication import memory
from tests.parity import TOLERANCE, Trace, difference, reference, spread_run
from tests.ranks import Ranks

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.second(torch.tanh(self.first(x)))


class Stack(nn.Module):
    """The plain one, to which each oddity is done."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class CalledTwice(Stack):
    """One block's weights at several depths."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index in (0, 1, 0, 2, 0):
            x = self.layers[index](x)
        return self.head(x)


class BackToFront(Stack):
    """Runs in another order than it was built in, by keyword."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in reversed(self.layers):
            x = layer(x=x, scale=0.5)
        return self.head(x)


class ReachesInside(Stack):
    """Uses weights outside the module that owns them."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        penalty = self.layers[1].first.weight.square().sum() + self.stem.weight.T.abs().sum()
        assert self.layers[2].second.weight.shape == (WIDTH, 7)
        return x + 0.01 * penalty


class Adapters(Stack):
    """A frozen body with small trainable parts."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(2, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer, down, up in zip(self.layers, self.down, self.up, strict=True):
            x = layer(x) + up(down(x))
        return self.head(x)


class DetachedUse(Block):
    """Backward needs these weights after their own gradients have come: what was computed first comes last."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        beside = torch.tanh(x @ self.first.weight.detach().T @ self.second.weight.detach().T)
        return super().forward(x, scale) + beside


class Detached(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DetachedUse() for _ in range(3))


class InPlaceBlock(Block):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = F.relu(x.clone(), inplace=True)
        out = self.second(F.relu(self.first(x), inplace=True))
        return out.add_(x)


class InPlace(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(InPlaceBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
            x += 0.5
        return self.head(x)


class InPlaceViews(Stack):
    """Changes what a linear gives in place, where that is a view of what was computed: of three dims and more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu_(self.stem(x.unsqueeze(1).repeat(1, 4, 1)))
        for layer in self.layers:
            x = F.elu(layer(x), inplace=True)
        x = self.head(x)
        x[:, 1:] *= 2
        return x.sum(1)


@dataclass
class Answer:
    logits: Tensor
    extra: dict[str, Tensor]


class ObjectBlock(Block):
    def forward(self, x: Tensor, scale: float = 1.0) -> Any:  # type: ignore[override]
        return Answer(super().forward(x, scale), {"unused": x * 2})


class Objects(Stack):
    """Blocks that give objects, of which a part is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ObjectBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x).logits
        return self.head(x)


@dataclass(slots=True)
class Narrow:
    logits: Tensor


class SlotsBlock(Block):
    def forward(self, x: Tensor, scale: float = 1.0) -> Any:  # type: ignore[override]
        return Narrow(super().forward(x, scale))


class Slots(Objects):
    """Blocks that give objects without a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SlotsBlock() for _ in range(3))


class PassingBlock(DetachedUse):
    def forward(self, x: Tensor, scale: float = 1.0) -> Any:  # type: ignore[override]
        return super().forward(x, scale), x


class Passing(Stack):
    """Blocks that give their input back beside their output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PassingBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x, before = layer(x)
            x = x + 0.1 * before
        return self.head(x)


class Early(Stack):
    """Uses weights before the module that owns them has run."""

    def forward(self, x: Tensor) -> Tensor:
        penalty = self.layers[1].first.weight.square().sum() + self.head.weight.abs().sum()
        return super().forward(x) + 0.01 * penalty


class Forces(Stack):
    """Takes a gradient of its own while it computes."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(super().forward(x).sum(), x)
        return super().forward(x.detach() + slope.detach())


class Skips(Stack):
    """A block whose result does not reach the loss, and one whose result a sample's contents mask."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        h = self.layers[0](h)
        self.layers[1](h)
        chosen = (x[:, :1] > 0).to(h.dtype)
        h = h * (1 - chosen) + self.layers[2](h) * chosen
        return self.head(h)


class Normed(Stack):
    """Weights computed from other weights."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            weight_norm(layer.first)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(5, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x.unsqueeze(1))[0][:, -1])


MODELS = [
    Stack, CalledTwice, BackToFront, ReachesInside, Adapters, Detached, InPlace, InPlaceViews, Objects, Slots, Passing,
    Early, Forces, Skips, Normed, Recurrent,
]  # fmt: skip
LAYOUTS = [
    "fsdp=2", "fsdp=2,micro_batch=2", "fsdp=2,zero=2", "dp=2,offload=params", "fsdp=2,offload=optimizer,zero=1",
    "fsdp=2,recompute=full",
]  # fmt: skip


@dataclass
class Odd(phalanx.Task):
    kind: type[nn.Module] = Stack
    global_batch: int = 7
    steps: int = 3
    precision: phalanx.task.Precision = "float64"
    clip: float = 0.01

    def model(self) -> nn.Module:
        return self.kind()

    def data(self) -> phalanx.data.Arrays:
        source = torch.Generator().manual_seed(0)
        return phalanx.data.Arrays(x=torch.randn(17, 5, generator=source), y=torch.arange(17) % 3)

    def inputs(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["x"]

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> phalanx.Loss:
        return phalanx.losses.cross_entropy(output, batch["y"])


def run_all(kind: type[nn.Module]) -> list[Trace]:
    blocks = kind is not Recurrent
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "LARGE_BYTES", 1)  # as large weights are kept, whose memory reads as zeros once let go
        return [spread_run(Odd(kind=kind), Layout.parse(text)) for text in LAYOUTS if blocks or "recompute" not in text]


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_odd_models_train_like_one_device(ranks: Ranks, kind: type[nn.Module]) -> None:
    expected = reference(Odd(kind=kind))
    for text, trace in zip(LAYOUTS, ranks(2, run_all, kind)[0], strict=False):
        error, where = difference(trace, expected)
        assert error < TOLERANCE, f"{text}: {error:.1e} in {where}"
