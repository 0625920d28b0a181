"""Weights' gradients that are computed while tensor parallelism sums: nothing changes but the order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx import Anatomy, Layout
from phalanx.models.lora import Lora, attach
from phalanx.parallel.axes import overlap
from phalanx.parallel.axes.overlap import LateWeight
from phalanx.parallel.communication.communicator import Communicator
from phalanx.prove.reference.activations import round_activations
from tests.parity import TOLERANCE, HostileLanguage, HostileTransformer, Trace, difference, reference, spread_run
from tests.ranks import Ranks


class WithBiases(HostileTransformer):
    """Every linear of a block has one."""

    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                module.bias = nn.Parameter(torch.randn(module.out_features))


@dataclass
class Biased(HostileLanguage):
    def model(self) -> nn.Module:
        return WithBiases(self.layers, self.heads, self.kv_heads)


@dataclass
class WholeStream(HostileLanguage):
    """Attention is whole on every rank, and so is the stream: its gradients are all-reduced."""

    def anatomy(self, model: nn.Module) -> Anatomy:
        return Anatomy.of(model, splits={"*.gate_proj": "column", "*.up_proj": "column", "*.down_proj": "row"})


@dataclass
class PartlyFrozen(HostileLanguage):
    """A low-rank product beside some linears, of which one is cut by output and one by input; one column is frozen."""

    def model(self) -> nn.Module:
        made = super().model()
        attach(made, Lora(3, 6.0), ["q_proj", "down_proj"])
        for name, weight in made.named_parameters():
            weight.requires_grad_("lora" in name or ".up_proj" in name or ".o_proj" in name)
            if "lora_B" in name:
                nn.init.normal_(weight, std=0.1)
        return made


@contextmanager
def any_size() -> Iterator[None]:
    """However little is summed, and even that without a short way of its own."""
    with (
        mock.patch.object(overlap, "LEAST_BYTES", 0),
        mock.patch.object(overlap, "CHUNK_BYTES", 64),
        mock.patch.object(Communicator, "small_bytes", 64),
    ):
        yield


def traced(task: phalanx.Task, layout: str) -> tuple[Trace, Counter[str]]:
    """With how often linears were called of which weights come late, and in how many chunks."""
    called = Counter[str]()
    linear, scattered = LateWeight.linear, LateWeight.scattered

    def counted_linear(self: LateWeight, *of: Any) -> Tensor:
        called["linear"] += 1
        return linear(self, *of)

    def counted_scattered(self: LateWeight, x: Tensor, group: Communicator, chunks: int, *how: Any) -> Tensor:
        called[f"in {chunks}"] += 1
        return scattered(self, x, group, chunks, *how)

    with (
        any_size(),
        mock.patch.object(LateWeight, "linear", counted_linear),
        mock.patch.object(LateWeight, "scattered", counted_scattered),
    ):
        return spread_run(task, Layout.parse(layout)), called


@pytest.mark.parametrize(
    ("task", "layout"),
    [
        (Biased(), "tp=2"),
        (WholeStream(), "tp=2,micro_batch=8"),
        (PartlyFrozen(), "tp=2"),
        (HostileLanguage(heads=8, kv_heads=2), "tp=4"),
        (HostileLanguage(), "tp=2,fsdp=2,recompute=full"),
        (HostileLanguage(), "tp=2,fsdp=2,zero=2,recompute=selective"),
        (HostileLanguage(), "tp=2,cp=2"),
        (HostileLanguage(), "tp=2,pp=2,micro_batch=8"),
        (Biased(), "tp=2,activations=fp8"),
        (WholeStream(), "tp=2,activations=bf16"),
        (PartlyFrozen(), "tp=2,activations=bf16"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_it_trains_like_one_device(ranks: Ranks, task: HostileLanguage, layout: str) -> None:
    spread = Layout.parse(layout)
    expected = reference(
        task, spread.micro_batches(task.global_batch), observe=partial(round_activations, task, spread)
    )
    trace, called = ranks(spread.world, traced, task, layout)[0]
    assert called["linear"]
    assert (called["in 4"] > 0) == (not isinstance(task, WholeStream) and spread.cp == 1 and spread.tp == 2)
    error, where = difference(trace, expected)
    assert error < TOLERANCE, where


def trained_at(task: HostileLanguage, least: int) -> tuple[list[float], int]:
    """Losses with overlap from so many bytes on, and how often weights came late."""
    made = mock.Mock(side_effect=LateWeight)
    with (
        mock.patch.object(overlap, "LEAST_BYTES", least),
        mock.patch.object(overlap, "LateWeight", made),
        phalanx.Engine(task, "tp=2", device="cpu") as engine,
    ):
        return [engine.step(batch).loss for batch in engine.batches()], made.call_count


def test_ranks_with_more_and_fewer_tokens_do_the_same(ranks: Ranks) -> None:
    """Nine tokens are five and four: what a rank has itself, times ranks, lies on both sides of this."""
    task = HostileLanguage(steps=2)
    for least in range(0, 16 * 12 * 12 * 8, 16 * 12 * 4):
        (losses, late), (others, as_often) = ranks(2, trained_at, task, least)
        assert losses == others
        assert late == as_often


def watched(task: phalanx.Task) -> list[str]:
    """Of a step: collectives along tp, when they are launched and waited for, and gradients, when they are there."""
    seen: list[str] = []
    with any_size(), phalanx.Engine(task, "tp=2", device="cpu") as engine:
        batches = engine.batches()
        engine.step(next(batches))

        @contextmanager
        def waiting(axis: str, kind: str) -> Iterator[None]:
            seen.append(f"wait {axis} {kind}")
            yield

        engine.traffic.watchers.append(lambda axis, kind, tensor: seen.append(f"launch {axis} {kind}"))
        engine.traffic.wait_watchers.append(waiting)
        engine.spread.reduction.on_gradient = lambda name, gradient: seen.append(name)
        engine.step(next(batches))
    return seen


def test_a_containers_gradients_come_between_the_launch_of_its_sum_and_the_wait(ranks: Ranks) -> None:
    for seen in ranks(2, watched, HostileLanguage()):
        for container, linears in (
            ("attention", ("q_proj", "k_proj", "v_proj", "o_proj")),
            ("feed_forward", ("gate_proj", "up_proj", "down_proj")),
        ):
            for block in range(2):
                places = [seen.index(f"blocks.{block}.{container}.{linear}.weight") for linear in linears]
                first, last = min(places), max(places)
                assert last - first == len(linears) - 1
                assert seen[first - 1 : last + 2 : last - first + 2] == [
                    "launch tp reduce-scatter", "wait tp reduce-scatter"
                ]  # fmt: skip


def test_chunks_of_tokens_are_all_under_way_before_one_is_waited_for(ranks: Ranks) -> None:
    for seen in ranks(2, watched, HostileLanguage()):
        text = " ".join(seen)
        for kind in ("reduce-scatter", "all-gather"):
            assert " ".join([f"launch tp {kind}"] * 4 + [f"wait tp {kind}"] * 4) in text


@pytest.mark.parametrize("wanted", ["x", "weight"])
def test_what_one_backward_leaves_does_not_count_in_the_next(wanted: str) -> None:
    weight = nn.Parameter(torch.randn(3, 5, dtype=torch.float64))
    x = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    late = LateWeight(weight)
    total = (late.linear(x, None) + late.linear(2 * x, None)).square().sum()
    torch.autograd.grad(total, x if wanted == "x" else weight, retain_graph=True)
    total.backward()
    found, x.grad = x.grad, None
    given, weight.grad = weight.grad, None
    (3 * x @ weight.T).square().sum().backward()
    assert torch.allclose(found, x.grad)
    assert torch.allclose(given, weight.grad)


def test_it_is_left_where_the_order_is_not_autograds() -> None:
    assert overlap.possible(Layout.parse("tp=2,pp=2,micro_batch=1"))
    assert not overlap.possible(Layout.parse("tp=2,pp=2,micro_batch=1,schedule=zb"))
    assert not overlap.possible(Layout.parse("tp=2,compile=blocks"))
