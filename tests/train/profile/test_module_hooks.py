"""Each module's own time and FLOPs: branches, residuals and parts of parts are told apart, and nothing is changed."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phalanx.parallel.axes.pipeline import StageEnds
from phalanx.train.profile.flops import FlopCount
from phalanx.train.profile.module_hooks import BACKWARD, FORWARD, ModuleHooks, around


class Slow(torch.autograd.Function):
    """Takes its time, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(0.03)
        return gradient


class Sleeper(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Slow.apply(x)


class Part(nn.Module):
    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.left, self.right, self.sleeper, self.again = nn.Linear(8, 8), nn.Linear(8, 4), Sleeper(), again

    def computed(self, x: Tensor) -> Tensor:
        return self.left(x) * self.right(x).repeat(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        made = checkpoint(self.computed, x, use_reentrant=False) if self.again else self.computed(x)
        return x + self.sleeper(made) @ torch.ones(8, 8)


class Whole(nn.Module):
    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.first, self.parts = nn.Linear(8, 8), nn.ModuleList([Part(again), Part(again)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for part in self.parts:
            x = part(x)
        return x


def one_step(again: bool, count: bool) -> tuple[ModuleHooks, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, x = Whole(again), torch.randn(4, 8)
    hooks = ModuleHooks(model.named_modules(), cuda=False)
    with hooks:
        hooks.phase(FORWARD)
        counter = FlopCount(hooks.counted) if count else torch.enable_grad()
        with counter:
            loss = model(x).pow(2).sum()
            hooks.phase(BACKWARD)
            loss.backward()
            hooks.phase("")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return hooks, {name: w.grad for name, w in model.named_parameters() if w.grad is not None}


def test_names_around_a_module() -> None:
    assert around("a.0.b") == ("a.0.b", "a.0", "a", "")
    assert around("") == ("",)


@pytest.mark.parametrize("again", [False, True])
def test_flops_add_up_and_each_module_has_its_own(again: bool) -> None:
    hooks, _ = one_step(again, count=True)
    linear, narrow, ones = 2 * 4 * 8 * 8, 2 * 4 * 8 * 4, 2 * 4 * 8 * 8
    flops = {name: own.flops for name, own in hooks.found.items()}
    assert flops["first"] == {FORWARD: linear, BACKWARD: linear}  # its input needs no gradient
    for part in ("parts.0", "parts.1"):
        assert flops[f"{part}.left"] == {FORWARD: linear, BACKWARD: (2 + again) * linear}
        assert flops[f"{part}.right"] == {FORWARD: narrow, BACKWARD: (2 + again) * narrow}
        inside = linear + narrow
        assert flops[part] == {FORWARD: inside + ones, BACKWARD: (2 + again) * inside + ones}
    assert flops[""][FORWARD] == linear + 2 * flops["parts.0"][FORWARD]
    assert flops[""][BACKWARD] == linear + 2 * flops["parts.0"][BACKWARD]
    assert hooks.outside.flops == {FORWARD: 0, BACKWARD: 0}


@pytest.mark.parametrize("again", [False, True])
def test_time_is_that_of_who_takes_it(again: bool) -> None:
    hooks, _ = one_step(again, count=False)
    seconds = {name: (own.seconds(FORWARD), own.seconds(BACKWARD)) for name, own in hooks.found.items()}
    for part in ("parts.0", "parts.1"):
        assert seconds[f"{part}.sleeper"][0] >= 0.02
        assert seconds[f"{part}.sleeper"][1] >= 0.03
        assert seconds[part][1] >= 0.03
        assert seconds[f"{part}.left"][1] < 0.02, "another's time"
    assert 0.04 <= seconds[""][0] < 0.2
    assert 0.06 <= seconds[""][1] < 0.2
    assert hooks.found["parts.0.left"].recomputed == again
    assert [hooks.found[name].calls for name in ("", "parts", "parts.0", "parts.0.left")] == [1, 0, 1, 1]
    assert hooks.found["parts.0"].output_bytes == 4 * 8 * 4


def test_gradients_are_the_same_bits() -> None:
    _, watched = one_step(again=False, count=True)
    torch.manual_seed(0)
    model, x = Whole(), torch.randn(4, 8)
    model(x).pow(2).sum().backward()
    assert all(torch.equal(watched[name], weight.grad) for name, weight in model.named_parameters())


def test_a_module_that_raises_is_left() -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError

    model = nn.Sequential(nn.Linear(2, 2), Raises())
    hooks = ModuleHooks(model.named_modules(), cuda=False)
    with hooks:
        hooks.phase(FORWARD)
        with pytest.raises(KeyError):
            model(torch.ones(1, 2))
        nn.Linear(2, 2)(torch.ones(1, 2))
        hooks.counted(5)
    assert hooks.outside.flops[FORWARD] == 5
    assert hooks.found["0"].calls == 1


def test_modules_that_the_end_of_a_stage_has_left_run_no_more() -> None:
    class Ends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise StageEnds(x)

    model = nn.Sequential(nn.Linear(2, 2), Ends())
    hooks = ModuleHooks(model.named_modules(), cuda=False)
    with hooks:
        hooks.phase(FORWARD)
        with pytest.raises(StageEnds):
            model(torch.ones(1, 2))
        hooks.phase(BACKWARD)
        hooks.counted(5)
    assert hooks.outside.flops[BACKWARD] == 5
    assert [own.calls for own in hooks.found.values()] == [1, 1, 1]
