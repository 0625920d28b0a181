"""A mixture of experts against the same written out token by token."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.losses import penalised, penalty_factor
from phalanx.models.experts import Experts, MixtureOfExperts, Router

CASE = {"width": 6, "hidden": 5, "experts": 4, "chosen": 2, "balance": 0.0, "flatness": 0.0}


def one_by_one(model: MixtureOfExperts, x_BTD: Tensor, kept: Tensor | None = None) -> Tensor:
    out = torch.zeros_like(x_BTD)
    for b, t in torch.cartesian_prod(*map(torch.arange, x_BTD.shape[:2])).tolist():
        likings = (model.router.weight @ x_BTD[b, t]).softmax(0)
        shares, chosen = likings.topk(model.router.chosen)
        for k, (share, expert) in enumerate(zip(shares / shares.sum(), chosen.tolist(), strict=True)):
            if kept is None or kept[b, t, k]:
                gate, up = (model.experts.gate_up_proj[expert] @ x_BTD[b, t]).chunk(2)
                out[b, t] += share * (model.experts.down_proj[expert] @ (F.silu(gate) * up))
    return out


def mixture(capacity: float | None = None) -> MixtureOfExperts:
    torch.manual_seed(1)
    return MixtureOfExperts(**CASE, capacity=capacity).double()  # type: ignore[arg-type]


def test_every_token_goes_to_its_experts() -> None:
    model, x = mixture(), torch.randn(3, 5, 6, dtype=torch.float64, requires_grad=True)
    found, expected = model(x), one_by_one(model, x)
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad(found.square().sum(), [x, *model.parameters()]),
        torch.autograd.grad(expected.square().sum(), [x, *model.parameters()]),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_an_expert_without_tokens_has_zero_gradients() -> None:
    experts = Experts(4, 6, 5)
    experts(torch.randn(3, 6), torch.tensor([[0, 2]] * 3), torch.full((3, 2), 0.5)).sum().backward()
    for weight in experts.parameters():
        assert weight.grad is not None
        assert not weight.grad[[1, 3]].any()
        assert weight.grad[[0, 2]].any()
    experts(torch.randn(3, 6), torch.full((3, 2), 4), torch.full((3, 2), 0.5)).sum().backward()  # nobody was chosen


def test_room_is_counted_by_sequence_and_the_first_come_first() -> None:
    model, x = mixture(capacity=0.5), torch.randn(2, 8, 6, dtype=torch.float64)
    _, chosen, _ = Router.forward(mixture().router.eval(), x)
    kept = torch.zeros_like(chosen, dtype=torch.bool)
    for b in range(2):
        load = [0] * 4
        for t in range(8):
            for k, expert in enumerate(chosen[b, t].tolist()):
                load[expert] += 1
                kept[b, t, k] = load[expert] <= 2  # half of the even share of 8 x 2 / 4
    assert not kept.all()
    torch.testing.assert_close(model(x), one_by_one(model, x, kept))


def test_padding_does_not_count() -> None:
    """Nor does it matter how much of it there is."""
    x = torch.randn(2, 8, 6, dtype=torch.float64)
    lengths = torch.tensor([8, 3])
    gradients = []
    for time in (8, 11):
        model = mixture(capacity=0.6)
        model.router.balance, model.router.flatness = 0.5, 0.1
        padded = F.pad(x, [0, 0, 0, time - 8], value=9.0)
        valid = (torch.arange(time) < lengths.unsqueeze(1)).unsqueeze(-1)
        (model(padded, valid) * valid).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_penalties_are_least_where_the_load_is_even_and_logits_are_small() -> None:
    router = Router(4, 4, 1, None, balance=1.0, flatness=0.0)
    even, skewed = torch.eye(4).unsqueeze(0) * 9, torch.tensor([9.0, 0, 0, 0]).expand(1, 4, 4)
    ones = torch.ones(1, 4, 1)
    values = [float(router._penalty(x, F.one_hot(x.argmax(-1), 4), ones)) for x in (even, skewed)]
    assert values[0] == pytest.approx(4.0, rel=1e-3)  # tokens
    assert values[1] > 3 * values[0]
    router.balance, router.flatness = 0.0, 1.0
    small, large = (float(router._penalty(x, F.one_hot(x.argmax(-1), 4), ones)) for x in (even, even * 2))
    assert large > small > 0


def test_a_penalty_has_the_losss_factor() -> None:
    x, y = torch.ones(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    with penalty_factor(0.25):
        (penalised(x, y.square()).sum() * 0.25).backward()
    assert x.grad is not None
    assert y.grad is not None
    assert x.grad.tolist() == [0.25] * 3
    assert float(y.grad) == 0.25 * 4
