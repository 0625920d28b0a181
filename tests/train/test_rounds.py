"""All micro-batches at once: what a model may give, its buffers counted once, its memory that of one micro-batch."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

import phalanx
from phalanx import Layout, Loss, WrongUse
from phalanx.train.rounds import rebuilt
from tests.comparing import Named
from tests.parity import HostileLanguage
from tests.ranks import Ranks
from tests.tasks import Digits

Pair = namedtuple("Pair", ["x", "again"])


@dataclass
class Given:
    x: Tensor
    name: str = "x"
    rest: list[Any] = field(default_factory=list)


def test_whatever_holds_tensors_is_rebuilt_as_it_was() -> None:
    x = torch.ones(2)
    seen: list[Tensor] = []
    for output in (x, [x, 3], (x, None), {"a": x, "b": ("c", x)}, Pair(x, x), Given(x, rest=[x])):
        made = rebuilt(output, lambda tensor: seen.append(tensor) or 2 * tensor)
        assert type(made) is type(output)
    assert len(seen) == 9
    hidden = rebuilt(BaseModelOutput(last_hidden_state=x), lambda tensor: 2 * tensor)
    assert isinstance(hidden, BaseModelOutput)
    assert hidden.last_hidden_state.tolist() == hidden[0].tolist() == [2, 2]
    assert made.rest[0].tolist() == made.x.tolist() == [2, 2]
    assert made.name == "x"
    with pytest.raises(WrongUse, match="gives a Plain, which cannot be kept"):
        rebuilt(type("Plain", (), {})(), lambda tensor: tensor)


class Counting(nn.Module):
    """Keeps count of the samples it has seen, and of the most activations that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
        return self.inner(x)


@dataclass
class Compared(Digits):
    precision: str = "float64"
    compares: bool = True

    def model(self) -> nn.Module:
        return Counting()

    def loss(self, output: Tensor, batch: dict[str, Any]) -> Loss:
        every = phalanx.gather(output) if self.compares else output
        return Loss((output.unsqueeze(1) - every).square().sum().sqrt(), len(output))


def buffers(task: phalanx.Task, layout: str) -> dict[str, Tensor]:
    with phalanx.Engine(task, Layout.parse(layout), device="cpu") as engine:
        for batch in engine.batches():
            engine.step(batch)
        assert engine.spread.samples.all_at_once == (task.compares and "micro" in layout)
        return {name: buffer.clone() for name, buffer in engine.spread.model.named_buffers()}


@pytest.mark.parametrize("layout", ["dp=1", "micro_batch=3"])
def test_buffers_move_once_a_micro_batch(layout: str) -> None:
    """Also in the first step, which is begun anew when the loss turns out to need all."""
    once, plain = (buffers(Compared(steps=1, compares=compares), layout) for compares in (True, False))
    assert all(torch.equal(once[name], plain[name]) for name in once), "the first step's weights are the same"
    found = buffers(Compared(steps=4), layout)
    assert int(found["seen"]) == 4 * 8
    assert int(found["inner.1.num_batches_tracked"]) == 4 * (3 if "micro" in layout else 1)


class Replacing(Counting):
    """Has another tensor as its buffer after each call."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + len(x)
        return self.inner(x)


def test_a_buffer_that_is_another_tensor_after_each_call_moves_once() -> None:
    class Replaced(Compared):
        def model(self) -> nn.Module:
            return Replacing()

    assert int(buffers(Replaced(steps=4), "micro_batch=3")["seen"]) == 4 * 8


@dataclass
class Later(Compared):
    """Two turns that train the same weights, of which the second compares samples."""

    turns = ("plain", "comparing")

    def trains(self, turn: str, weight: str) -> bool:
        return True

    def loss(self, output: Tensor, batch: Any) -> Loss:
        if batch.turn == "comparing":
            return super().loss(output, batch)
        return Loss(output.square().sum(), len(output))


def test_buffers_move_once_whenever_it_turns_out() -> None:
    found = buffers(Later(steps=4), "micro_batch=3")
    assert int(found["seen"]) == 4 * 8
    assert int(found["inner.1.num_batches_tracked"]) == 4 * 3


class Passes(Compared):
    """Held-out samples are compared, those that are trained on are not, or the other way round."""

    def evaluate(self, output: Tensor, batch: Any) -> dict[str, Loss]:
        every = output if self.compares else phalanx.gather(output)
        return {"far": Loss((output.unsqueeze(1) - every).square().sum(), len(output))}


@pytest.mark.parametrize("compares", [False, True])
def test_an_evaluation_that_compares_makes_training_no_slower(compares: bool) -> None:
    with phalanx.Engine(Passes(compares=compares), Layout.parse("micro_batch=4"), device="cpu") as engine:
        passes, found = 0, []

        def count(*_: Any) -> None:
            nonlocal passes
            passes += 1

        engine.spread.model.register_forward_hook(count)
        for batch in engine.batches():
            engine.step(batch)
            found.append(passes)
            engine.evaluate(1)
            found.append(passes)
            passes = 0
        trained, both = found[2::2], found[3::2]
        assert trained == [4 if compares else 2] * 5
        assert [b - a for a, b in zip(trained, both, strict=True)] == [2] * 5


def norms(task: phalanx.Task, layout: str) -> list[float]:
    with phalanx.Engine(task, Layout.parse(layout), device="cpu") as engine:
        return [engine.step(batch).grad_norm for batch in engine.batches()]


class Lazy(HostileLanguage):
    def loss(self, output: Any, batch: dict[str, Tensor]) -> Loss:
        phalanx.gather(output[:, 0] + 0)
        return super().loss(output, batch)


def test_lazy_logits_are_made_where_they_are_kept() -> None:
    whole, parts = norms(Lazy(steps=2), "dp=1"), norms(Lazy(steps=2), "micro_batch=8")
    assert parts == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.1), ("fp16", 0.02), ("fp32", 1e-4)])
def test_narrow_dtypes_and_their_scale(ranks: Ranks, precision: Any, tolerance: float) -> None:
    expected = norms(Named(steps=2, clip=1e9), "dp=1")
    task = Named(steps=2, precision=precision, clip=1e9)
    assert norms(task, "micro_batch=8") == pytest.approx(expected, rel=tolerance)
    assert ranks(2, norms, task, "fsdp=2,micro_batch=8")[0] == pytest.approx(expected, rel=tolerance)


def test_some_micro_batches_that_gather_and_others_that_do_not_are_refused() -> None:
    class Sometimes(Compared):
        def loss(self, output: Tensor, batch: dict[str, Any]) -> Loss:
            if phalanx.rows(output)[0] < 3:
                phalanx.gather(output)
            return Loss(output.square().sum(), len(output))

    with pytest.raises(WrongUse, match="in some micro-batches and not in others"):
        norms(Sometimes(steps=1), "micro_batch=3")


def test_a_loss_that_gathers_more_with_gradients_is_refused() -> None:
    class Doubtful(Compared):
        def loss(self, output: Tensor, batch: dict[str, Any]) -> Loss:
            if torch.is_grad_enabled():
                phalanx.gather(output)
            return super().loss(output, batch)

    with pytest.raises(WrongUse, match="gathers more where gradients are computed"):
        norms(Doubtful(steps=1), "micro_batch=3")


def test_a_loss_of_nothing_that_is_trained_is_refused() -> None:
    class Detached(Compared):
        def loss(self, output: Tensor, batch: dict[str, Any]) -> Loss:
            return Loss(phalanx.gather(output.detach()).sum(), len(output))

    with pytest.raises(WrongUse, match="does not depend on any trainable weight"):
        norms(Detached(steps=1), "micro_batch=3")
