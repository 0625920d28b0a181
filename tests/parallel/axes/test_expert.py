"""Tokens that travel to their experts and back. (Parity: tests/train and test_hugging_face.)"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx import Layout
from phalanx.models.experts import Experts
from phalanx.parallel.axes.expert import ExpertParallel
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.narrow import Narrow
from phalanx.parallel.communication.traffic import Traffic
from phalanx.prove.reference.activations import round_activations
from tests.parity import TOLERANCE, HostileLanguage, Mixture, Trace, difference, reference, spread_run
from tests.ranks import RankFailed, Ranks


def travel(choices: list[list[list[int]]]) -> tuple[float, float, list[float]]:
    """Errors of outputs and of input gradients against all experts here, and gradients by expert here."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = Experts(4, 6, 5).double()
    inputs = [torch.randn(len(chosen), 6, dtype=torch.float64) for chosen in choices]
    shares = [torch.rand(len(chosen), 2, dtype=torch.float64) for chosen in choices]
    chosen = [torch.tensor(rows, dtype=torch.int64).view(-1, 2) for rows in choices]
    expected = [whole(x.requires_grad_(), c, s) for x, c, s in zip(inputs, chosen, shares, strict=True)]
    sum(out.square().sum() for out in expected).backward()
    model = torch.nn.ModuleDict({"experts": Experts(4, 6, 5).double()})
    own = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
    anatomy = phalanx.Anatomy.of(model)
    ExpertParallel(model, anatomy, Communicator(dist.group.WORLD, Traffic()), Narrow("exact"))
    for name, weight in whole.named_parameters():
        setattr(model["experts"], name, torch.nn.Parameter(weight.detach()[own].clone()))
    x = inputs[rank].detach().clone().requires_grad_()
    out = model["experts"](x, chosen[rank], shares[rank])
    out.square().sum().backward()
    errors = [
        float((weight.grad - whole.get_parameter(name).grad[own]).abs().max())  # type: ignore[operator,index]
        for name, weight in model["experts"].named_parameters()
        if weight.grad is not None
    ]
    return float((out - expected[rank]).abs().sum()), float((x.grad - inputs[rank].grad).abs().sum()), errors  # type: ignore[operator]


@pytest.mark.parametrize("choices", [
    [[[0, 1], [2, 3], [3, 0]], [[1, 2], [0, 3]]],
    [[[0, 1], [1, 0]], [[0, 1]]],  # nobody chooses the second rank's
    [[[2, 3]], []],  # nor has everybody a token
    [[[4, 4], [4, 1]], [[4, 4]]],  # some choose nobody
])  # fmt: skip
def test_tokens_come_back_as_if_all_experts_were_here(ranks: Ranks, choices: list[list[list[int]]]) -> None:
    for out, gradient, weights in ranks(2, travel, choices):
        assert max(out, gradient, *weights) < 1e-12


def step(task: phalanx.Task, layout: str) -> None:
    with phalanx.Engine(task, Layout.parse(layout), device="cpu") as engine:
        engine.step(next(iter(engine.batches())))


class SixExperts(Mixture):
    def model(self) -> torch.nn.Module:
        model = super().model()
        for block in model.blocks:  # type: ignore[union-attr]
            block.feed_forward.experts = Experts(6, 12, 13)
        return model


@pytest.mark.parametrize(("task", "words"), [
    (HostileLanguage(), "ep=4 finds no experts in HostileTransformer"),
    (SixExperts(), "blocks.0.feed_forward.experts has 6 experts, which do not divide by ep=4.*such as ep=3"),
])  # fmt: skip
def test_what_cannot_be_spread_is_refused(ranks: Ranks, task: phalanx.Task, words: str) -> None:
    with pytest.raises(RankFailed, match=words):
        ranks(4, step, task, "fsdp=4,ep=4")


def spread(task: phalanx.Task, layout: str) -> Trace:
    return spread_run(task, Layout.parse(layout))


def test_tokens_in_fewer_bits_are_those_that_one_device_rounds(ranks: Ranks) -> None:
    task, layout = Mixture(steps=2), Layout.parse("fsdp=2,ep=2,activations=fp8")
    right = reference(task, observe=partial(round_activations, task, layout))
    error, where = difference(ranks(2, spread, task, str(layout))[0], right)
    assert error < TOLERANCE, where
