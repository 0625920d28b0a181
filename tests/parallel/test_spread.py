"""Spreading as a whole: initial weights, what is saved, and buffers, the same for every layout."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import phalanx
from phalanx import Layout
from tests.parity import HostileLanguage, HostileVision
from tests.ranks import RankFailed, Ranks
from tests.tasks import Digits


def initial(task: phalanx.Task, layout: str) -> dict[str, torch.Tensor]:
    with phalanx.Engine(task, Layout.parse(layout), device="cpu") as engine:
        names = [name for name, _, _ in engine.spread.whole.description()]
        weights = engine.whole_weights()
        assert names == list(weights)
        for (name, dtype, shape), tensor in zip(engine.spread.whole.description(), weights.values(), strict=True):
            assert (tensor.dtype, tensor.shape) == (dtype, shape), name
        return weights


def test_initial_weights_do_not_depend_on_the_layout(ranks: Ranks) -> None:
    for task in (HostileLanguage(), HostileVision()):
        expected = initial(task, "dp=1")
        for world, layout in ((2, "fsdp=2"), (4, "dp=2,fsdp=2,zero=2"), (8, "fsdp=8")):
            for found in ranks(world, initial, task, layout):
                assert found.keys() == expected.keys()
                for name, tensor in expected.items():
                    assert torch.equal(found[name], tensor), (layout, name)


def test_saved_names_are_the_models_own() -> None:
    saved = initial(HostileVision(), "dp=1")
    assert set(saved) == set(HostileVision().model().state_dict())
    language = HostileLanguage().model().state_dict()
    assert set(initial(HostileLanguage(), "dp=1")) == set(language) - {"head.weight"}, "a tied weight is saved twice"


class Quantised(nn.Module):
    """Weights that are whole numbers, beside one that learns; and a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.arange(12, dtype=torch.int8).view(4, 3), requires_grad=False)
        self.scale = nn.Parameter(torch.full((3,), 0.1))
        self.plain = torch.ones(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.plain.view(1, 4)) @ (self.codes * self.scale)


class QuantisedTask(Digits):
    def model(self) -> nn.Module:
        return Quantised()


def train_quantised() -> dict[str, torch.Tensor]:
    with phalanx.Engine(QuantisedTask(), Layout(fsdp=dist.get_world_size()), device="cpu") as engine:
        for batch in engine.batches():
            engine.step(batch)
        return engine.whole_weights()


def test_whole_numbers_stay_as_they_are(ranks: Ranks) -> None:
    weights = ranks(2, train_quantised)[1]
    assert weights["codes"].dtype == torch.int8
    assert weights["codes"].flatten().tolist() == list(range(12))
    assert not torch.equal(weights["scale"], torch.full((3,), 0.1))


class Counting(nn.Module):
    """Counts in a weight of whole numbers, which should be a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.times = nn.Parameter(torch.zeros(4, dtype=torch.int64), requires_grad=False)
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.times.add_(1)
        return self.layer(x)


class CountingTask(Digits):
    def model(self) -> nn.Module:
        return Counting()


def count(layout: str) -> list[int]:
    with phalanx.Engine(CountingTask(steps=2), layout, device="cpu") as engine:
        for batch in engine.batches():
            engine.step(batch)
        return engine.whole_weights()["times"].tolist()


def test_what_a_model_writes_to_a_sharded_weight_is_not_lost_without_a_word(ranks: Ranks) -> None:
    assert count("dp=1") == [2] * 4
    with pytest.raises(RankFailed, match=r"the model's forward writes to times, which is no buffer"):
        ranks(2, count, "fsdp=2")


class Backbone(nn.Module):
    """Keeps its norm in evaluation mode while it trains, as detectors do (``norm_eval``)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.asked: list[bool] = []

    def train(self, mode: bool = True) -> Backbone:
        super().train(mode)
        self.norm.eval()
        self.asked.append(mode)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


class BackboneTask(Digits):
    def model(self) -> nn.Module:
        return Backbone()


def test_the_models_own_train_is_called_as_a_loop_would() -> None:
    with phalanx.Engine(BackboneTask(), "dp=1", device="cpu") as engine:
        model, batches = engine.model, engine.batches()
        for _ in range(2):
            engine.step(next(batches))
        assert model.asked == [True]
        assert int(model.norm.num_batches_tracked) == 0
        engine.evaluate()
        engine.step(next(batches))
        assert model.asked == [True, False, True]
        model.first.eval()  # somebody changes it: the next step has it as it should be
        engine.step(next(batches))
        assert model.asked == [True, False, True, True]
        assert model.first.training
        assert not model.norm.training
