"""Tokens that travel to their experts and back. (Parity: tests/train and test_hugging_face.)"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import phalanx
from phalanx import Layout, WrongUse
from phalanx.models.experts import Experts
from phalanx.parallel.axes.expert import ExpertCalls, ExpertParallel
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


class EveryToken(nn.Module):
    """Experts that are given every token once each, and nothing else: tokens that did not choose one are zeros."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.weight = nn.Parameter(torch.randn(experts, 6, 6, dtype=torch.float64))

    def forward(self, rows: Tensor) -> Tensor:
        return torch.bmm(rows.view(len(self.weight), -1, 6), self.weight).tanh().view(-1, 6)


class Counted(EveryToken):
    """Experts that are given rows sorted by expert, and how many are each one's."""

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:  # type: ignore[override]
        parts = rows.split(counts)
        return torch.cat([part @ self.weight[expert] for expert, part in enumerate(parts)]).tanh()


class Routed(nn.Module):
    """One way to experts. Each token has as many as it has positive scores, and each counts as much as its score."""

    def __init__(self, experts: EveryToken) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        count = scores.shape[1]
        if isinstance(self.experts, Counted):
            expert, token = (scores.T > 0).nonzero(as_tuple=True)
            done = self.experts(x[token], (scores > 0).sum(0).tolist()) * scores[token, expert, None]
            return torch.zeros_like(x).index_add(0, token, done)
        rows = x.repeat(count, 1) * scores.T.reshape(-1, 1)
        return self.experts(rows).view(count, -1, 6).sum(0)


def sorted_rows(kind: type[EveryToken], tokens: list[int], some: float) -> tuple[float, float, float]:
    """Errors of outputs, of input gradients and of weight gradients against all experts here."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = Routed(kind(4))
    inputs = [torch.randn(count, 6, dtype=torch.float64).requires_grad_() for count in tokens]
    scores = [torch.rand(count, 4, dtype=torch.float64) * (torch.rand(count, 4) < some) for count in tokens]
    expected = [whole(x, score) for x, score in zip(inputs, scores, strict=True)]
    sum(out.square().sum() for out in expected).backward()  # type: ignore[union-attr]
    right = whole.experts.weight
    model = Routed(kind(4))
    own = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
    spread = nn.ModuleDict({"mixture": model})
    ExpertParallel(spread, phalanx.Anatomy.of(spread), Communicator(dist.group.WORLD, Traffic()), Narrow("exact"))
    model.experts.weight = nn.Parameter(right.detach()[own].clone())
    x = inputs[rank].detach().clone().requires_grad_()
    out = model(x, scores[rank])
    out.square().sum().backward()
    found = [(out, expected[rank]), (x.grad, inputs[rank].grad), (model.experts.weight.grad, right.grad[own])]  # type: ignore[index]
    errors = [float((one - other).abs().max()) if one.numel() else 0.0 for one, other in found]  # type: ignore[operator,union-attr]
    return errors[0], errors[1], errors[2]


@pytest.mark.parametrize(("kind", "tokens", "some"), [
    (EveryToken, [3, 2], 0.5),
    (EveryToken, [3, 0], 0.5),
    (Counted, [3, 2], 0.5),
    (Counted, [5, 0], 0.3),  # a rank has no token
    (Counted, [2, 2], 0.0),  # nobody chooses any
])  # fmt: skip
def test_rows_that_are_sorted_by_expert_come_back_in_their_places(
    ranks: Ranks, kind: type[EveryToken], tokens: list[int], some: float
) -> None:
    for errors in ranks(2, sorted_rows, kind, tokens, some):
        assert max(errors) < 1e-12


def test_a_call_whose_meaning_is_not_known_is_refused() -> None:
    model = nn.ModuleDict({"mixture": Routed(EveryToken(4))})
    calls = ExpertCalls(model, "mixture.experts")
    model["mixture"](torch.randn(3, 6, dtype=torch.float64), torch.rand(3, 4, dtype=torch.float64))
    assert calls.read((torch.randn(12, 6),), {}).counts == [3] * 4
    with pytest.raises(WrongUse, match=r"mixture.experts is called with 1 arguments, .* shape \(13, 6\).*leave ep out"):
        calls.read((torch.randn(13, 6),), {})
    counted = ExpertCalls(nn.ModuleDict({"mixture": Routed(Counted(4))}), "mixture.experts")
    assert counted.read((torch.randn(5, 6),), {"counts": [1, 2, 0, 2]}).told
    with pytest.raises(WrongUse, match="with 2 arguments"):
        counted.read((torch.randn(5, 6), [1, 4]), {})


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
