"""Weights' gradients that are computed while tensor parallelism sums: nothing changes but the order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
    with mock.patch.object(overlap, "LEAST_BYTES", 0), mock.patch.object(Communicator, "small_bytes", 64):
        yield


def traced(task: phalanx.Task, layout: str) -> tuple[Trace, int]:
    late = []
    run = LateWeight.linear
    with any_size(), mock.patch.object(LateWeight, "linear", lambda *of: late.append(of[0]) or run(*of)):
        return spread_run(task, Layout.parse(layout)), len(late)


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
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_it_trains_like_one_device(ranks: Ranks, task: HostileLanguage, layout: str) -> None:
    spread = Layout.parse(layout)
    expected = reference(task, spread.micro_batches(task.global_batch))
    trace, late = ranks(spread.world, traced, task, layout)[0]
    assert late
    error, where = difference(trace, expected)
    assert error < TOLERANCE, where
