"""Settings by the names of weights: which weight has which, from Python, the command line and TOML; what is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn, optim

import phalanx
from phalanx import Anatomy, ParameterGroup, Task, WrongUse
from phalanx.parallel.weights.blueprint import Blueprint
from phalanx.parameters import _said, building, fitted, from_the_end, settings_of
from phalanx.settings import make_task, plain_settings
from phalanx.toml import from_toml, to_toml
from phalanx.train.optimizers import make_optimizer
from tests.tasks import Digits


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(3))
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(3))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5)
        self.fixed = nn.Parameter(torch.zeros(2), requires_grad=False)


@dataclass
class Named(Task):
    def model(self) -> nn.Module:
        return Deep()


def noted(**settings: Any) -> dict[str, Any]:
    model = Blueprint(building(Named(**settings)), 0).model
    return {name: settings_of(weight) for name, weight in model.named_parameters() if weight.requires_grad}


def test_later_patterns_come_before_earlier_ones() -> None:
    found = noted(
        parameters={
            "*": ParameterGroup(frozen=True, weight_decay=0.3),
            "layers.*": ParameterGroup(frozen=False, learning_rate_factor=0.5, clip=1.0),
            "layers.2.*": ParameterGroup(learning_rate_factor=0.1, rate="constant"),
            "layers.?.1.bias": ParameterGroup(weight_decay=0.0, frozen_steps=7),
        }
    )
    assert set(found) == {f"layers.{i}.{j}.{kind}" for i in range(3) for j in range(2) for kind in ("weight", "bias")}
    middle, last = found["layers.1.0.weight"], found["layers.2.1.bias"]
    assert (middle.factor, middle.weight_decay, middle.clip, middle.clipped_with) == (0.5, 0.3, 1.0, "layers.*")
    assert (last.factor, last.weight_decay, last.rate, last.first) == (0.1, 0.0, "constant", 7)


def test_the_rate_decays_from_the_last_block_to_the_first() -> None:
    depths = from_the_end(Anatomy.of(Deep()))
    told = {name: depths[name] for name in ("head.bias", "norm.weight", "layers.2.0.weight", "layers.0.0.weight")}
    assert told == {"head.bias": 0, "norm.weight": 0, "layers.2.0.weight": 1, "layers.0.0.weight": 3}
    assert (depths["embed.weight"], depths["place"]) == (4, 4)
    found = noted(layer_decay=0.5, parameters={"layers.2.*": ParameterGroup(learning_rate_factor=10.0)})
    assert (found["layers.2.0.bias"].factor, found["layers.1.0.bias"].factor, found["place"].factor) == (
        5,
        0.25,
        0.0625,
    )


def test_muon_has_matrices_of_blocks_alone() -> None:
    task = Named(optimizer_kind="muon", learning_rate=0.3, weight_decay=0.2)
    model = building(task)()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    for name, weight in model.named_parameters():
        weight.logical_name = name  # type: ignore[attr-defined]
    made = task.optimizer(weights)
    assert isinstance(made, dict)
    muon, adamw = made["muon"], made["adamw"]
    assert isinstance(muon, optim.Muon)
    hidden = {weight.logical_name for group in muon.param_groups for weight in group["params"]}
    assert hidden == {f"layers.{number}.0.weight" for number in range(3)}
    assert (muon.param_groups[0]["lr"], muon.param_groups[0]["weight_decay"]) == (0.3, 0.2)
    assert len(hidden) + sum(len(group["params"]) for group in adamw.param_groups) == len(weights)


class Tied(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Shared(Named):
    def model(self) -> nn.Module:
        return Tied()


def test_a_second_name_of_a_tied_weight_is_told() -> None:
    with pytest.raises(WrongUse, match=r"matches head.weight, a second name of embed.weight. Use that one"):
        building(Shared(parameters={"head.weight": ParameterGroup(clip=1.0)}))()
    task = Shared(layer_decay=0.5, parameters={"head.*": ParameterGroup(clip=1.0)})
    found = {name: settings_of(weight) for name, weight in building(task)().named_parameters()}
    assert (found["embed.weight"].factor, found["embed.weight"].clip, found["head.bias"].clip) == (0.0625, None, 1.0)


def test_nothing_is_noted_where_nothing_is_said() -> None:
    task = Named()
    assert building(task) == task.model


class Own(Named):
    def optimizer(self, params: Any) -> optim.Optimizer:
        return optim.SGD(params)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"parameters": {"layer.*": {"clip": 1}}}, r"parameters\['layer.\*'\] matches no weight that is trained"),
        ({"parameters": {"head.wieght": {"clip": 1}}}, "did you mean 'head.weight'"),
        ({"parameters": {"fixed": {"clip": 1}}}, "matches no weight that is trained"),
        ({"parameters": {"head.*": {"clip": 1}, "*": {"clip": 2}}}, r"parameters\['head.\*'\] has clip=1.0, and later"),
        (
            {"parameters": {"*": {"frozen": True}, "head.*": {"frozen_steps": 2}}},
            "that it is frozen, and that it is for 2",
        ),
        ({"parameters": {"*": {"frozen": True, "frozen_steps": 2}}}, "Give one of the two"),
        ({"parameters": {"*": {}}}, "says nothing about its weights"),
        ({"parameters": {"*": {"learning_rate_factor": 0}}}, "learning_rate_factor=0.0 is no factor"),
        ({"parameters": {"*": {"weight_decay": -1}}}, "weight_decay=-1.0 is no rate"),
        ({"parameters": {"*": {"clip": 0}}}, "clip=0.0 would stop all learning"),
        ({"parameters": {"*": {"frozen_steps": -1}}}, "frozen_steps=-1 is below 0"),
        ({"parameters": {"*": {"rate": "sine"}}}, "did you mean 'cosine'"),
        ({"parameters": {"*": {"decay": 0}}}, "ParameterGroup has no field 'decay'; did you mean 'weight_decay'"),
        ({"parameters": {"*": {"clip": "much"}}}, "clip='much' is not"),
        ({"parameters": "[]"}, "is not a table, in JSON"),
        ({"layer_decay": 0}, "layer_decay=0.0 is no decay"),
        ({"optimizer_kind": "lion"}, "is not one of: adamw, muon"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(WrongUse, match=words):
        building(make_task(Named, settings))()


class Flat(Digits):
    def model(self) -> nn.Module:
        return nn.Linear(4, 3)


def test_models_without_blocks_are_refused_what_goes_by_them() -> None:
    with pytest.raises(WrongUse, match=r"layer_decay=0.9 goes by a model's repeated blocks"):
        phalanx.Engine(Flat(layer_decay=0.9), device="cpu")
    with pytest.raises(WrongUse, match="optimizer_kind=muon updates matrices of repeated blocks"):
        phalanx.Engine(Flat(optimizer_kind="muon"), device="cpu")


def test_a_kind_that_the_tasks_own_optimizer_is_not_is_refused() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(WrongUse, match="optimizer_kind=muon has no effect"):
        make_optimizer(Own(optimizer_kind="muon"), [weight], trained=True)


def test_a_dict_that_is_not_a_field_is_told() -> None:
    class Forgot(Named):
        parameters = {"*": ParameterGroup(clip=1.0)}  # noqa: RUF012

    with pytest.raises(WrongUse, match=r"parameters = \.\.\. in Forgot is not taken"):
        Forgot().check()


@dataclass
class Given(Named):
    parameters: dict[str, ParameterGroup] = field(
        default_factory=lambda: {"head.*": ParameterGroup(learning_rate_factor=3.0, frozen=False)}
    )


def test_they_are_said_in_words_and_read_back() -> None:
    words = {"embed.*": {"weight_decay": 0, "rate": "wsd:decay=0.1"}, "head.*": {"frozen_steps": 3}}
    task = make_task(Named, {"parameters": json.dumps(words)})
    assert task.parameters["embed.*"] == ParameterGroup(weight_decay=0.0, rate="wsd:decay=0.1")
    for each in (task, Given()):
        plain = plain_settings(each)
        again = make_task(type(each), from_toml(to_toml({"task": plain}))["task"])
        assert again.parameters == each.parameters
    assert plain_settings(Given())["parameters"] == {"head.*": {"learning_rate_factor": 3.0, "frozen": False}}


def test_a_smaller_model_is_fitted() -> None:
    task = Named(parameters={"layers.2.*": ParameterGroup(clip=1.0), "head.*": ParameterGroup(clip=2.0)})
    found, lost = fitted(task, ["layers.0.0.weight", "head.weight"])
    assert (list(found.parameters), lost) == (
        ["head.*"], ["parameters 'layers.2.*' left out: the smaller model has no such weight"],
    )  # fmt: skip
    assert len(task.parameters) == 2


def test_what_later_patterns_say_of_all_that_is_left_is_left_out() -> None:
    own = {f"layers.{place}.*": ParameterGroup(clip=2.0 + place) for place in (0, 1)}
    task = Named(parameters={"layers.*": ParameterGroup(clip=1.0), **own, "head.*": ParameterGroup(clip=9.0)})
    names = [f"layers.{place}.0.weight" for place in range(3)] + ["head.weight"]
    assert fitted(task, names) == (task, [])
    found, lost = fitted(task, [name for name in names if name != "layers.2.0.weight"])
    assert (list(found.parameters), len(lost)) == ([*own, "head.*"], 1)
    _said(found.parameters, ["layers.0.0.weight", "layers.1.0.weight", "head.weight"], {})
    both = Named(parameters={"layers.*": ParameterGroup(clip=1.0, weight_decay=0.0), **own})
    found, lost = fitted(both, ["layers.0.0.weight", "layers.1.0.weight"])
    assert found.parameters["layers.*"] == ParameterGroup(weight_decay=0.0)
    assert lost == ["parameters 'layers.*': clip left out: others say it of all such weights that are left"]
