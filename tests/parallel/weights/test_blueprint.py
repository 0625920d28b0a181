"""Blueprints: the constructor's own initialisation, weight by weight, without ever holding the model."""

from __future__ import annotations

import copy
import math
import resource
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import phalanx
from phalanx import WrongUse
from phalanx.parallel.torch_private import FakeTensor
from phalanx.parallel.weights.blueprint import Blueprint
from tests.parity import HostileTransformer
from tests.tasks import Digits


class Everything(nn.Module):
    """What people do in constructors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 5)
        self.embedding = nn.Embedding(7, 8, padding_idx=2)
        self.norm = nn.BatchNorm1d(5)
        self.own = nn.Parameter(torch.randn(3, 4) * 0.02)
        self.orthogonal = nn.Linear(6, 6)
        nn.init.orthogonal_(self.orthogonal.weight)
        nn.init.trunc_normal_(self.linear.bias, std=0.1, a=-0.05, b=0.05)
        table = torch.zeros(10, 4)
        place = torch.arange(10).unsqueeze(1)
        table[:, 0::2] = torch.sin(place * torch.exp(torch.arange(0, 4, 2) * (-math.log(1e4) / 4)))
        self.register_buffer("table", table)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.number = torch.rand(1).item()
        self.chosen = torch.ones(4).nonzero().flatten().tolist()
        self.mask = torch.ones(4, 4).tril()
        self.tied = nn.Linear(8, 7, bias=False)
        self.tied.weight = self.embedding.weight
        self.given = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.partly = nn.Parameter(torch.full((3,), 2.5))
        with torch.no_grad():
            self.partly[1:].mul_(2)
            self.given[0].normal_()
        self.copied = nn.Parameter(self.partly.detach().clone())
        self.recurrent = nn.LSTM(3, 4)
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.LSTM):
            nn.init.kaiming_normal_(module.weight_ih_l0)


def values(seed: int) -> dict[str, torch.Tensor]:
    blueprint = Blueprint(Everything, seed)
    return {name: blueprint.value(weight, "cpu") for name, weight in blueprint.model.named_parameters()}


def test_the_constructors_initialisation_is_kept() -> None:
    blueprint = Blueprint(Everything, 0)
    model = blueprint.model

    def value(tensor: torch.Tensor) -> torch.Tensor:
        return blueprint.value(tensor, "cpu")

    square = value(model.orthogonal.weight)
    assert torch.allclose(square @ square.T, torch.eye(6), atol=1e-5)
    assert value(model.linear.bias).abs().max() <= 0.05
    assert value(model.linear.weight).abs().max() <= 1 / math.sqrt(8)
    assert not value(model.embedding.weight)[2].any()
    assert value(model.own).std() < 0.05
    assert value(model.partly).tolist() == value(model.copied).tolist() == [2.5, 5, 5]
    assert value(model.norm.running_var).tolist() == [1] * 5
    assert value(model.table)[1, 0] == pytest.approx(math.sin(1))
    assert value(model.mask)[0].tolist() == [1, 0, 0, 0]
    assert model.rates[1] == pytest.approx(0.05)
    assert 0 <= model.number < 1
    assert model.chosen == [0, 1, 2, 3]
    assert value(model.given)[1] == 2
    assert model.tied.weight is model.embedding.weight


def test_a_constructor_may_convert_the_model() -> None:
    plain, blueprint = (
        Blueprint(Everything, 3),
        Blueprint(lambda: Everything().to("cpu").to(torch.bfloat16).double(), 3),
    )
    want = dict(plain.model.named_parameters())
    for name, weight in blueprint.model.named_parameters():
        value = blueprint.value(weight, "cpu")
        assert value.dtype == torch.float64
        assert torch.equal(value, plain.value(want[name], "cpu").to(torch.bfloat16).double()), name
    assert blueprint.model.tied.weight is blueprint.model.embedding.weight


def test_weights_depend_on_the_seed_and_their_name_alone() -> None:
    first, again, other = values(0), values(0), values(1)
    random = [name for name in first if name not in ("given", "partly", "copied", "norm.weight", "norm.bias")]
    for name in first:
        assert torch.equal(first[name], again[name])
    for name in random:
        assert not torch.equal(first[name], other[name]), f"{name} ignores the seed"
    blueprint = Blueprint(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 0)
    one, two = (blueprint.value(layer.weight, "cpu") for layer in blueprint.model)
    assert not torch.equal(one, two), "two layers got the same weights"


def test_a_model_that_would_not_fit_is_described_for_nothing() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    blueprint = Blueprint(lambda: nn.Sequential(*[nn.Linear(1 << 14, 1 << 14) for _ in range(100)]), 0)
    assert sum(weight.numel() for weight in blueprint.model.parameters()) > 26e9
    assert all(isinstance(weight, FakeTensor) for weight in blueprint.model.parameters())
    assert blueprint.value(blueprint.model[7].bias, "cpu").abs().max() <= 1 / math.sqrt(1 << 14)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200 * 1024, f"describing a model took {grown / 1024:.0f} MiB"


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(WrongUse, match=r"returned a int"):
        Blueprint(lambda: 3, 0)
    with pytest.raises(WrongUse, match="not known before the first batch"):
        Blueprint(lambda: nn.LazyLinear(3), 0)


class Related(nn.Module):
    """Values that come from other values."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(5, 3)
        self.teacher = copy.deepcopy(self.student)
        self.normed = weight_norm(nn.Linear(5, 4))
        self.spread = self.student.weight.std().item()
        self.register_buffer("doubled", self.student.weight.detach() * 2)
        constant = torch.tensor([1.0, 2.0, 3.0])
        self.given = nn.Parameter(torch.empty(3))
        with torch.no_grad():
            self.given.copy_(constant)
        constant.mul_(0)
        self.masks = [torch.ones(2), {"second": torch.zeros(3)}]


@dataclass
class RelatedTask(Digits):
    def model(self) -> nn.Module:
        made = nn.Sequential(nn.Linear(4, 3))
        made.related = Related()
        return made


def test_what_was_equal_in_the_constructor_is_equal() -> None:
    blueprint = Blueprint(Related, 3)
    model = blueprint.model

    def value(tensor: torch.Tensor) -> torch.Tensor:
        return blueprint.value(tensor, "cpu")

    student = value(model.student.weight)
    assert torch.equal(value(model.teacher.weight), student)
    assert model.spread == pytest.approx(student.std().item())
    assert torch.equal(value(model.doubled), student * 2)
    assert value(model.given).tolist() == [1, 2, 3]
    parts = model.normed.parametrizations.weight
    direction = value(parts.original1)
    assert torch.allclose(value(parts.original0), direction.norm(dim=1, keepdim=True))


def test_tensors_in_lists_and_dicts_are_filled() -> None:
    with phalanx.Engine(RelatedTask(), "dp=1", device="cpu") as engine:
        masks = engine.spread.model.related.masks
        assert masks[0].tolist() == [1, 1]
        assert masks[1]["second"].tolist() == [0, 0, 0]


def test_what_cannot_be_kept_is_refused() -> None:
    class Hooked(Digits):
        def model(self) -> nn.Module:
            made = nn.Linear(4, 3)
            made.weight.register_hook(lambda gradient: gradient * 0)
            return made

    class Hidden(Digits):
        def model(self) -> nn.Module:
            made = nn.Linear(4, 3)
            made.table = SimpleNamespace(values=torch.ones(3))
            return made

    class Complex(Digits):
        def model(self) -> nn.Module:
            made = nn.Linear(4, 3)
            made.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
            return made

    for kind, words in ((Hooked, "weight has a hook"), (Hidden, "'table'"), (Complex, "phase is torch.complex64")):
        with pytest.raises(WrongUse, match=words):
            phalanx.Engine(kind(), "dp=1", device="cpu")


def test_marks_on_a_weight_stay() -> None:
    class Marked(Digits):
        def model(self) -> nn.Module:
            made = nn.Linear(4, 3)
            made.weight.no_decay = True
            return made

    with phalanx.Engine(Marked(), "dp=1", device="cpu") as engine:
        assert [getattr(shard, "no_decay", False) for shard in engine.spread.shards()] == [True, False]


@pytest.mark.gpu
def test_a_gpu_fills_in_the_same_weights() -> None:
    """Draws that only torch's own generators know how to make too: those of a GPU give other values."""
    blueprint = Blueprint(lambda: HostileTransformer(2, 2, 1), seed=3)
    for name, weight in blueprint.model.named_parameters():
        there = blueprint.value(weight, "cuda")
        assert there.device.type == "cuda"
        assert torch.equal(there.cpu(), blueprint.value(weight, "cpu")), name


class FromFile(nn.Module):
    """Puts real tensors, as read from a file, into its weights by their ``data``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(2, 3)
        self.first.weight.data = torch.from_numpy(np.arange(6, dtype=np.float32).reshape(2, 3))
        self.second.weight.data = self.first.weight.data.t() + 1
        self.second.bias.data = torch.zeros(3)


def test_real_tensors_may_be_assigned_to_weights() -> None:
    blueprint = Blueprint(FromFile, 0)
    weights = {name: blueprint.value(weight, "cpu") for name, weight in blueprint.model.named_parameters()}
    expected = FromFile()
    assert torch.equal(weights["first.weight"], expected.first.weight)
    assert torch.equal(weights["second.weight"], expected.second.weight)
    assert torch.equal(weights["second.bias"], torch.zeros(3))


class SeededItself(nn.Module):
    """Fixed projections, and weights, that a generator of the constructor's own draws."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(3)
        self.register_buffer("projection", torch.randn(3, 4, generator=own))
        self.weight = nn.Parameter(torch.empty(4, 3).normal_(generator=own))
        self.square = nn.Linear(3, 3, bias=False)
        nn.init.orthogonal_(self.square.weight, generator=own)
        self.register_buffer("again", torch.empty(3, 4))
        self.again.copy_(torch.randn(3, 4, generator=torch.Generator().manual_seed(3)))


def test_a_generator_of_the_constructors_own_is_asked() -> None:
    made, plain = Blueprint(SeededItself, 0), SeededItself()
    for name, tensor in plain.state_dict().items():
        described = dict([*made.model.named_parameters(), *made.model.named_buffers()])[name]
        assert torch.equal(made.value(described, "cpu"), tensor), name
