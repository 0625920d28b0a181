"""A divergence in chunks is that of whole logits, and so is its gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx import losses
from phalanx.kernels import linear_cross_entropy as fused
from phalanx.kernels.cross_entropy import Bending
from phalanx.kernels.linear_cross_entropy import Vocabulary
from phalanx.kernels.linear_divergence import LinearHead, linear_divergence
from phalanx.logits import Logits

ROWS, CLASSES = 23, 11


def given() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(rows, 5, dtype=torch.float64, requires_grad=True) for rows in (ROWS, CLASSES))
    others, other = (torch.randn(rows, 7, dtype=torch.float64) for rows in (ROWS, CLASSES))
    return hidden, weight, others, other, torch.arange(ROWS) % 4 != 0


def plainly(own: Tensor, goal: Tensor, counted: Tensor, reverse: bool) -> Tensor:
    one, two = (own.log_softmax(1), goal.log_softmax(1)) if reverse else (goal.log_softmax(1), own.log_softmax(1))
    return (one.exp() * (one - two)).sum(1)[counted].sum()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("bending", [Bending(), Bending(0.5), Bending(0.2, 5.0)])
def test_chunks_give_what_whole_logits_do(monkeypatch: pytest.MonkeyPatch, reverse: bool, bending: Bending) -> None:
    monkeypatch.setattr(fused, "LOGIT_ELEMENTS", 5 * CLASSES)
    hidden, weight, others, other, counted = given()
    expected = plainly(bending(hidden @ weight.T), bending(others @ other.T), counted, reverse)
    by_whole = torch.autograd.grad(3 * expected, [hidden, weight])
    heads = [LinearHead(each, None, bending, None) for each in (weight, other)]
    found = linear_divergence(hidden, heads[0], others, heads[1], counted, reverse)
    by_chunks = torch.autograd.grad(3 * found, [hidden, weight])
    assert torch.allclose(found, expected, atol=1e-12)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(by_chunks, by_whole, strict=True))


@pytest.mark.parametrize("reverse", [False, True])
def test_the_loss_is_the_same_of_lazy_logits_and_of_tensors(reverse: bool) -> None:
    hidden, weight, others, other, counted = given()
    lazy = losses.divergence(Logits(hidden, weight), Logits(others, other), counted, reverse=reverse, temperature=2.0)
    plain = losses.divergence(hidden @ weight.T, others @ other.T, counted, reverse=reverse, temperature=2.0)
    assert lazy.count == plain.count == int(counted.sum())
    assert torch.allclose(lazy.total, plain.total, atol=1e-12)
    by_lazy, by_plain = (torch.autograd.grad(each.total, weight)[0] for each in (lazy, plain))
    assert torch.allclose(by_lazy, by_plain, atol=1e-12)


@pytest.mark.parametrize("reverse", [False, True])
def test_parts_of_a_vocabulary_come_to_terms(reverse: bool) -> None:
    """Two ranks take turns on threads' behalf: each collective is answered with what the other one's part gives."""
    hidden, weight, others, other, counted = given()
    expected = plainly(hidden @ weight.T, others @ other.T, counted, reverse)
    (by_whole,) = torch.autograd.grad(expected, weight)
    own, goal = hidden.detach() @ weight.detach().T, others @ other.T
    logs, wanted = own.log_softmax(1), goal.log_softmax(1)
    terms = logs.exp() * (logs - wanted) if reverse else wanted.exp() * (wanted - logs)
    whole = iter([own.amax(1), own.logsumexp(1), goal.amax(1), goal.logsumexp(1), terms.sum(1)])
    tops: list[Tensor] = []

    def largest(top: Tensor) -> None:
        tops.append(next(whole))
        top.copy_(tops[-1])

    def added(sums: Tensor) -> None:
        found = next(whole)
        sums.copy_((found - tops[-1]).exp() if len(tops) < 3 else found)
        if len(tops) == 2:
            tops.append(found)

    vocabulary = Vocabulary(CLASSES, 0, 6, lambda x: x, lambda x: x, added, largest)
    half = weight.detach()[:6].requires_grad_()
    heads = [LinearHead(each, None, Bending(), vocabulary) for each in (half, other[:6])]
    found = linear_divergence(hidden, heads[0], others, heads[1], counted, reverse)
    assert torch.allclose(found, expected, atol=1e-12)
    (by_part,) = torch.autograd.grad(found, half)
    assert torch.allclose(by_part, by_whole[:6], atol=1e-12)


def test_what_does_not_belong_together_is_refused() -> None:
    with pytest.raises(ValueError, match="Use models with one vocabulary"):
        losses.divergence(torch.zeros(2, 3, 5), torch.zeros(2, 3, 6), torch.ones(2, 3, dtype=torch.bool))


def test_its_gradient_is_not_differentiated() -> None:
    hidden, weight, others, other, counted = given()
    total = losses.divergence(Logits(hidden, weight), Logits(others, other), counted).total
    with pytest.raises(RuntimeError, match="cannot be differentiated"):
        torch.autograd.grad(total, hidden, create_graph=True)
