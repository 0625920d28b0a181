"""Models with activation checkpointing of their own train like one device that recomputes nothing."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import phalanx
from phalanx import Layout
from phalanx.models.transformer import Block, FeedForward
from phalanx.parallel.randomness.torch_checkpoint import called_modules
from tests.hugging_face import CausalLanguageModel
from tests.parity import (
    TOLERANCE,
    HostileLanguage,
    HostileResNet,
    HostileVision,
    Trace,
    difference,
    reference,
    spread_run,
)
from tests.ranks import Ranks
from tests.tasks import Digits

WORLDS = {
    1: ["dp=1", "dp=1,micro_batch=8"],
    2: ["dp=2", "fsdp=2", "fsdp=2,zero=2", "tp=2", "cp=2", "cp=2,cp_kind=ulysses", "pp=2,micro_batch=6"],
    4: [
        "pp=2,schedule=zb,fsdp=2,micro_batch=6",
        "tp=2,cp=2",
        "fsdp=2,tp=2,recompute=selective",
        "pp=2,cp=2,micro_batch=6",
    ],
}
VISION = {
    1: ["dp=1", "dp=1,micro_batch=8"],
    2: ["dp=2", "fsdp=2", "pp=2,micro_batch=6"],
    4: ["dp=2,fsdp=2,micro_batch=4"],
}


class OwnBlock(Block):
    """Calls itself under a checkpoint, as Hugging Face's blocks do."""

    reentrant = True

    def __call__(self, *args: Any) -> Any:
        return checkpoint(super().__call__, *args, use_reentrant=self.reentrant)


class OwnFeedForward(FeedForward):
    """A part of a block under checkpoints, one of them inside of the other."""

    reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: self.outer(y), x, use_reentrant=self.reentrant)

    def outer(self, x: Tensor) -> Tensor:
        gate = F.dropout(self.gate_proj(x), 0.2, self.training)
        hidden = checkpoint(self.inner, gate, x, use_reentrant=self.reentrant)
        return F.dropout(self.down_proj(hidden), 0.3, self.training)

    def inner(self, gate: Tensor, x: Tensor) -> Tensor:
        return F.silu(gate) * F.dropout(self.up_proj(x), 0.4, self.training)


@dataclass
class OwnLanguage(HostileLanguage):
    ways: str = "blocks"
    reentrant: bool = True

    def model(self) -> nn.Module:
        model = super().model()
        for block in model.blocks:
            if "blocks" in self.ways:
                block.__class__ = OwnBlock
            if "parts" in self.ways:
                block.feed_forward.__class__ = OwnFeedForward
            block.reentrant = block.feed_forward.reentrant = self.reentrant
        return model


class OwnResNet(HostileResNet):
    """Checkpoints around the stem, with its batch-norm, and around several blocks at once."""

    ways, reentrant = "segments", True

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.begin, x, use_reentrant=self.reentrant)
        if self.ways == "segments":
            x = checkpoint_sequential(self.blocks, 2, x, use_reentrant=self.reentrant)
        elif self.ways == "closures":
            for block in self.blocks:
                x = checkpoint((lambda module: lambda *inputs: module(*inputs))(block), x, use_reentrant=self.reentrant)
        else:
            x = checkpoint(self.blocks, x, use_reentrant=self.reentrant)
        return self.head(F.dropout(x, 0.2, self.training).mean((2, 3)))

    def begin(self, x: Tensor) -> Tensor:
        return F.dropout(self.stem(x), 0.3, self.training)


@dataclass
class OwnVision(HostileVision):
    ways: str = "segments"
    reentrant: bool = True

    def model(self) -> nn.Module:
        model = OwnResNet()
        model.ways, model.reentrant = self.ways, self.reentrant
        return model


@dataclass
class OwnHuggingFace(CausalLanguageModel):
    kind: str = "gpt2"
    reentrant: bool = True

    def model(self) -> nn.Module:
        model = super().model()
        model.gradient_checkpointing_enable({"use_reentrant": self.reentrant})
        return model


def run_all(task: phalanx.Task, layouts: list[str]) -> list[Trace]:
    return [spread_run(task, Layout.parse(layout)) for layout in layouts]


def compare(ranks: Ranks, task: phalanx.Task, worlds: dict[int, list[str]]) -> None:
    one_device = functools.cache(lambda micro_batches: reference(task, micro_batches))
    wrong = []
    for world, layouts in worlds.items():
        for layout, trace in zip(layouts, ranks(world, run_all, task, layouts)[0], strict=True):
            parsed = Layout.parse(layout)
            error, where = difference(trace, one_device(parsed.micro_batches(task.global_batch)))
            if not error < TOLERANCE:
                wrong.append(f"{layout}: {error:.1e} in {where}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("ways", ["blocks", "parts", "blocks and parts"])
def test_a_language_model_draws_the_same_again(ranks: Ranks, ways: str, reentrant: bool) -> None:
    compare(ranks, OwnLanguage(ways=ways, reentrant=reentrant), WORLDS)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("ways", ["segments", "closures", "all blocks"])
def test_a_model_of_images_draws_and_normalises_the_same_again(ranks: Ranks, ways: str, reentrant: bool) -> None:
    compare(ranks, OwnVision(ways=ways, reentrant=reentrant), VISION)


@pytest.mark.parametrize("reentrant", [True, False])
def test_hugging_faces_own_switch(ranks: Ranks, reentrant: bool) -> None:
    compare(ranks, OwnHuggingFace(steps=2, reentrant=reentrant), WORLDS)


class Counted(nn.Linear):
    calls: list[bool]

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(torch.is_grad_enabled())
        return super().forward(x)


class CountedNet(nn.Module):
    """Two blocks and a layer before them, each under a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Counted(4, 5)
        self.blocks = nn.ModuleList(nn.Sequential(Counted(5, 5), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(5, 3)
        for module in self.modules():
            if isinstance(module, Counted):
                module.calls = []

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.first, x, use_reentrant=True)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.last(x)


@dataclass
class CountedTask(Digits):
    def model(self) -> nn.Module:
        return CountedNet()


def test_checkpoints_recompute_in_training_and_not_in_evaluation() -> None:
    with phalanx.Engine(CountedTask(), "dp=1", device="cpu") as engine:
        counted = [module for module in engine.model.modules() if isinstance(module, Counted)]
        engine.step(next(engine.batches()))
        assert [len(module.calls) for module in counted] == [2, 2, 2]
        engine.evaluate()
        assert {len(module.calls) for module in counted} == {2 + 2}  # batches of held-out data


def test_torch_is_as_it_was_outside_of_a_model() -> None:
    with phalanx.Engine(CountedTask(), "dp=1", device="cpu") as engine:
        before = torch.utils.checkpoint.CheckpointFunction
        engine.step(next(engine.batches()))
        assert torch.utils.checkpoint.CheckpointFunction is before
    x = torch.ones(2, requires_grad=True)
    assert type(checkpoint(torch.sin, x, use_reentrant=True).grad_fn).__name__ == "CheckpointFunctionBackward"


class OwnRecompute(torch.autograd.Function):
    """Activation checkpointing that somebody wrote: torch's generators are restored, which draws here do not use."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.state = torch.get_rng_state()
        return F.dropout(x.tanh(), 0.5)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.random.fork_rng(), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            again = x.detach().requires_grad_()
            (back,) = torch.autograd.grad(F.dropout(again.tanh(), 0.5), again, gradient)
        return back


class NoisyGradient(OwnRecompute):
    """Draws in backward by what no key answers."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * F.alpha_dropout(gradient, 0.5, True)


@dataclass
class OwnFunction(Digits):
    noisy: bool = False

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), Applied(NoisyGradient if self.noisy else OwnRecompute), nn.Linear(5, 3))


class Applied(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x)


@pytest.mark.parametrize(("noisy", "told"), [(False, "calls dropout"), (True, "draws random numbers")])
def test_draws_in_backward_that_are_not_keyed_are_refused(noisy: bool, told: str) -> None:
    with (
        phalanx.Engine(OwnFunction(noisy=noisy), "dp=1", device="cpu") as engine,
        pytest.raises(phalanx.WrongUse, match=f"{told} in its backward pass.*recompute=full"),
    ):
        engine.step(next(engine.batches()))


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(2), nn.Linear(2, 3), nn.Linear(3, 2)
        self.stages = nn.ModuleList([nn.Linear(2, 2)])

    def branch(self, x: Tensor) -> Tensor:
        return self.down(self.inner(x.float()))

    def inner(self, x: Tensor) -> Tensor:
        return self.up(x)

    def all(self, x: Tensor) -> Tensor:
        return [stage(x) for stage in self.stages][-1]


def test_modules_that_a_function_calls_are_seen() -> None:
    parts = Parts()
    held = {"module": parts.norm}

    def closure(x: Tensor) -> Tensor:
        return held["module"](x)

    def named(x: Tensor) -> Tensor:
        return parts.norm(x)

    def unknown(x: Tensor, own: nn.Module = parts) -> Tensor:
        return own(x)

    cases: list[tuple[Any, list[nn.Module]]] = [
        (parts.norm, [parts.norm]),
        (parts.norm.forward, [parts.norm]),
        (functools.partial(parts.up.forward, 1), [parts.up]),
        (functools.partial(unknown, own=parts.down), [parts, parts.down]),
        (closure, [parts.norm]),
        (named, [parts.norm]),
        (lambda x: parts.branch(x), [parts.down, parts.up]),
        (parts.branch, [parts.down, parts.up]),
        (parts.all, [parts.stages]),
        (unknown, [parts]),
        (torch.sin, []),
    ]
    for function, modules in cases:
        assert list(called_modules(function)) == modules, function
