"""Settings by the names of weights train under every layout like a loop by hand, in float64, on hostile data.

``pytest tests/train/test_parameter_groups.py --every`` takes more layouts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import phalanx
from phalanx import Layout, ParameterGroup, WrongUse
from phalanx.parameters import WeightSettings
from phalanx.prove.proof import prove
from phalanx.recipes.gpt import GPT
from phalanx.train.parameter_groups import Clipping, LearningRates, frozen_first, split
from phalanx.train.shrink import Needs, shrunk
from tests.by_name import InWords, NamedLanguage, named_task
from tests.checkpoints import contents, trained
from tests.parity import TOLERANCE, difference, reference, spread_run
from tests.ranks import Ranks
from tests.train.test_exact import digest

LAYOUTS = (
    "dp=1", "dp=2", "fsdp=2,zero=1", "fsdp=2,zero=2", "fsdp=2", "tp=2", "pp=2,micro_batch=8", "cp=2", "fsdp=2,ep=2",
    "fsdp=2,tp=2", "dp=2,fsdp=2", "pp=2,tp=2,micro_batch=4", "fsdp=2,cp=2,ep=2", "fsdp=4,offload=params",
)  # fmt: skip


def agrees(ranks: Ranks, layout: Layout, **settings: Any) -> None:
    task = named_task(layout, **settings)
    hand = InWords(task, task.layers)  # type: ignore[attr-defined]
    want = reference(task, layout.micro_batches(task.global_batch), trains=hand.trains, hand=hand)
    for found in ranks(layout.world, spread_run, task, layout):
        error, where = difference(found, want)
        assert error < TOLERANCE, f"{layout}: {error:.2e} in {where}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_train_like_a_loop_by_hand(ranks: Ranks, layout: str) -> None:
    agrees(ranks, Layout.parse(layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_muon_for_matrices_of_blocks_too(ranks: Ranks, layout: str) -> None:
    agrees(ranks, Layout.parse(layout), optimizer_kind="muon")


def weights_and_norms(task: phalanx.Task, layout: str) -> tuple[str, list[str]]:
    with phalanx.Engine(task, layout, device="cpu") as engine:
        norms = [metrics.grad_norm.hex() for metrics in map(engine.step, engine.batches())]
        return digest(engine.whole_weights()), norms


def test_exact_sums_give_the_same_bits_at_any_number_of_ranks(ranks: Ranks) -> None:
    layouts = map(Layout.parse, ("exact=8", "dp=2,exact=8", "fsdp=2,exact=8", "fsdp=2,zero=1,exact=8"))
    task = NamedLanguage(precision="fp32")
    found = [answer for layout in layouts for answer in ranks(layout.world, weights_and_norms, task, str(layout))]
    assert all(answer == found[0] for answer in found)


def test_a_run_goes_on_under_another_layout_while_weights_are_frozen(ranks: Ranks, tmp_path: Path) -> None:
    """Saved before the last are unfrozen, after one step and after three."""
    task = NamedLanguage()
    losses = ranks(1, trained, task, "dp=1", tmp_path / "whole", None, 4)[0]
    parts = ranks(2, trained, task, "fsdp=2", tmp_path / "one", None, 1)[0]
    parts += ranks(2, trained, task, "tp=2", tmp_path / "three", tmp_path / "one", 2)[0]
    parts += ranks(1, trained, task, "dp=1", tmp_path / "four", tmp_path / "three", 1)[0]
    assert parts == pytest.approx(losses, rel=1e-9)
    want, have = contents(tmp_path / "whole"), contents(tmp_path / "four")
    assert have.keys() == want.keys()
    assert not any("blocks.0.attention.q_proj" in name for name in want if name.startswith("optimizer/"))
    for name, tensor in have.items():
        torch.testing.assert_close(tensor, want[name], rtol=1e-7, atol=1e-10, msg=name)


@dataclass
class Proven(GPT):
    layer_decay: float = 0.8
    clip: float = 0.1
    parameters: dict[str, ParameterGroup] = field(
        default_factory=lambda: {
            "blocks.*": ParameterGroup(clip=0.01, learning_rate_factor=0.5),
            "*norm*": ParameterGroup(weight_decay=0.0, frozen_steps=2),
            "embedding.*": ParameterGroup(rate="constant", frozen_steps=1),
            "blocks.3.*": ParameterGroup(weight_decay=0.5),
        }
    )


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_it_is_proven(kind: Any) -> None:
    proof = prove(Proven(optimizer_kind=kind), ["fsdp=2", "pp=2"])
    assert proof.holds, proof


def test_a_smaller_model_is_said_to_lack_what_a_pattern_meant() -> None:
    found = shrunk(Proven(layers=12, width=256), Needs())
    assert "parameters 'blocks.3.*' left out: the smaller model has no such weight" in found.notes
    assert list(found.task.parameters) == ["blocks.*", "*norm*", "embedding.*"]


def marked(name: str, **settings: Any) -> nn.Parameter:
    weight = nn.Parameter(torch.ones(2, 2))
    weight.logical_name = name
    weight.weight_settings = WeightSettings(**settings)
    return weight


def test_groups_are_split_and_go_by_their_own() -> None:
    weights = [marked("a", factor=0.5), marked("b"), marked("c", weight_decay=0.0, rate="constant", first=2)]
    optimizer = optim.AdamW(weights, lr=0.1, weight_decay=0.2)
    split(optimizer, phalanx.Task(warmup_steps=0))
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    rates = LearningRates(optimizer)
    assert rates.set(lambda step: 0.5, 1) == pytest.approx(0.05)
    found = {g["params"][0].logical_name: (round(g["lr"], 9), g["weight_decay"]) for g in optimizer.param_groups}
    assert found == {"a": (0.025, 0.2), "b": (0.05, 0.2), "c": (0.0, 0.0)}
    rates.set(lambda step: 0.5, 2)
    assert optimizer.param_groups[2]["lr"] == pytest.approx(0.1)


def test_an_optimizer_without_decay_is_told() -> None:
    with pytest.raises(WrongUse, match="weight_decay of a, and the optimizer of Task has none"):
        split(optim.Rprop([marked("a", weight_decay=0.1)]), phalanx.Task())


def test_groups_are_clipped_by_their_own_norms() -> None:
    weights = {name: marked(name, clip=1.0, clipped_with="a*") for name in ("a", "ab")} | {"c": marked("c")}
    clipping = Clipping.of(phalanx.Task(clip=3.0), weights)
    assert clipping.groups == [{"a", "ab"}, {"c"}]
    rest, own = clipping.factors(5.0, [8.0, 12.0], 2.0)
    assert rest == pytest.approx(0.5, rel=1e-6)
    assert own == pytest.approx({"a": 0.25, "ab": 0.25}, rel=1e-6)
    assert Clipping.of(phalanx.Task(clip=3.0), {"c": marked("c")}).factors(6.0, [], 2.0)[0] == pytest.approx(0.5)


def test_weights_wait_for_their_first_step() -> None:
    (freeze,) = frozen_first({"a[0]": marked("a[0]", first=3), "b": marked("b")})
    assert [freeze.trains(step, "a[0]") for step in (0, 2, 3)] == [False, False, True]
    assert freeze.trains(0, "b")
