"""What stages of a pipeline know of modules that they do not have: their weights, and what shapes they give."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx import WrongUse
from phalanx.parallel.axes.elsewhere import AbsentWeight, given
from phalanx.parallel.forward.calls import shadow
from tests.ranks import RankFailed, Ranks

CPU = torch.device("cpu")


def test_a_weight_that_is_elsewhere_says_where_it_would_be_and_has_no_values() -> None:
    weight = AbsentWeight.of("head.weight", torch.empty(3, 2, dtype=torch.float64, device="meta"), CPU)
    assert (weight.device, weight.dtype, tuple(weight.shape)) == (CPU, torch.float64, (3, 2))
    assert not weight.requires_grad
    assert weight.new_zeros(2).tolist() == [0.0, 0.0]
    assert torch.ones_like(weight).sum() == 6
    assert torch.arange(2).to(weight).dtype == torch.float64
    assert torch.arange(2, device=weight.device).tolist() == [0, 1]
    assert copy.deepcopy(weight).device == CPU
    assert weight.detach().is_meta
    with pytest.raises(WrongUse, match=r"head\.weight is computed with on a stage of pp that does not have it"):
        nn.functional.linear(torch.ones(1, 2, dtype=torch.float64), weight)
    with pytest.raises(NotImplementedError):
        weight.tolist()


class Tower(nn.Module):
    """Pictures of several sizes in one row of patches, each attended to by itself and then pooled to some tokens."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.way = way
        self.enter, self.leave = nn.Linear(4, 6), nn.Linear(6, 6)

    def forward(self, patches: Tensor, sizes: Tensor) -> dict[str, Tensor]:
        x = self.enter(patches.to(self.enter.weight.device))
        if self.way == "kept":
            x = torch.cat([x[x[:, 0] > 0], x[x[:, 0] <= 0]])
        places = torch.cat([torch.arange(n, device=x.device) for n in sizes.to(x.device).tolist()])
        merged = places % torch.tensor([2, 2], device=x.device).tolist()[0] == 0
        parts = [part.softmax(0) for part in x.split(sizes.tolist())]
        return {"tokens": self.leave(torch.cat(parts))[merged], "places": places[merged]}


def test_shapes_follow_from_numbers_that_are_known() -> None:
    tower, patches, sizes = Tower(), torch.randn(9, 4), torch.tensor([2, 4, 3])
    expected = tower(patches, sizes)
    found = given("tower", shadow(tower, torch.float32), CPU, (patches, sizes), {})
    assert found["tokens"].is_meta
    assert found["tokens"].shape == expected["tokens"].shape == (5, 6)
    assert found["places"].tolist() == expected["places"].tolist()


class Written(nn.Linear):
    """Writes what it computes where whole numbers were known."""

    def forward(self, x: Tensor) -> Tensor:
        counts = torch.ones(len(x), dtype=torch.long, device=x.device)
        counts.copy_(super().forward(x)[:, 0])
        return x[counts]


@pytest.mark.parametrize("module", [Tower("kept"), Written(4, 4)])
def test_shapes_that_follow_from_computed_numbers_are_refused(module: nn.Module) -> None:
    arguments = torch.randn(9, 4), torch.tensor([2, 4, 3])
    arguments = arguments if isinstance(module, Tower) else arguments[:1]
    with pytest.raises(WrongUse, match="the sizes of what tower gives depend on numbers that it computes"):
        given("tower", shadow(module, torch.float32), CPU, arguments, {})


def test_mistakes_of_a_module_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"same reduction dim|cannot be multiplied"):
        given("linear", shadow(nn.Linear(4, 6), torch.float32), CPU, (torch.ones(2, 5),), {})


class WithPictures(nn.Module):
    """Puts what a tower makes of patches among its words, as language models that see do."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.tower, self.words = Tower(way), nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, 7)

    def forward(self, ids: Tensor, patches: Tensor, sizes: Tensor) -> Tensor:
        x = self.words(ids)
        sizes = sizes.to(next(self.tower.parameters()).device)
        seen = self.tower(patches.flatten(0, 1), sizes.flatten())["tokens"]
        places = (ids == 0).unsqueeze(-1)
        assert places.sum() * 6 == seen.numel()
        x = x.masked_scatter(places, seen)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass
class WithPicturesTask(phalanx.Task):
    way: str = ""
    precision: Any = "float64"
    global_batch: int = 4
    steps: int = 3
    ids: Tensor = field(
        default_factory=lambda: torch.cat([torch.zeros(8, 3).long(), torch.arange(16).view(8, 2) % 6 + 1], 1)
    )

    def model(self) -> nn.Module:
        return WithPictures(self.way)

    def data(self) -> phalanx.data.Arrays:
        patches = torch.randn(8, 6, 4, generator=torch.Generator().manual_seed(0))
        sizes = torch.tensor([[2, 4], [4, 2]]).repeat(4, 1)
        return phalanx.data.Arrays(ids=self.ids, patches=patches, sizes=sizes)

    def inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {name: batch[name] for name in ("ids", "patches", "sizes")}

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        return phalanx.losses.cross_entropy(output, batch["ids"], dim=-1)


def losses(task: phalanx.Task, layout: str) -> list[float]:
    with phalanx.Engine(task, layout, device="cpu") as engine:
        return [engine.step(batch).loss for batch in engine.batches()]


def test_a_tower_before_the_blocks_is_on_the_first_stage(ranks: Ranks) -> None:
    expected = losses(WithPicturesTask(), "dp=1")
    for layout in ("pp=2,micro_batch=2", "pp=2,micro_batch=1,schedule=zb"):
        assert ranks(2, losses, WithPicturesTask(), layout) == [pytest.approx(expected, rel=1e-9)] * 2


def test_a_tower_whose_sizes_cannot_be_told_is_refused(ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match="the sizes of what tower gives depend on numbers that it computes"):
        ranks(2, losses, WithPicturesTask(way="kept"), "pp=2")
