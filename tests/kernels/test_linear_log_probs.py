"""Log-probabilities in chunks are those of whole logits, and so are their gradients."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels import linear_cross_entropy as fused
from phalanx.kernels.cross_entropy import Bending
from phalanx.kernels.linear_cross_entropy import Kind, Vocabulary
from phalanx.kernels.linear_log_probs import linear_log_probs
from phalanx.logits import Logits

ROWS, WIDTH, CLASSES = 23, 5, 11


def given(bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(rows, WIDTH, dtype=torch.float64, requires_grad=True) for rows in (ROWS, CLASSES))
    targets = torch.randint(CLASSES, (ROWS,))
    targets[::4] = -100
    outer = torch.randn(ROWS, dtype=torch.float64)
    return (
        hidden,
        weight,
        torch.randn(CLASSES, dtype=torch.float64, requires_grad=True) if bias else None,
        targets,
        outer,
    )


def plainly(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, bending: Bending) -> Tensor:
    return -F.cross_entropy(bending(F.linear(hidden, weight, bias)), targets, reduction="none")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bending", [Bending(), Bending(0.5), Bending(0.2, 5.0)])
def test_chunks_give_what_whole_logits_do(monkeypatch: pytest.MonkeyPatch, bias: bool, bending: Bending) -> None:
    monkeypatch.setattr(fused, "LOGIT_ELEMENTS", 5 * CLASSES)
    hidden, weight, added, targets, outer = given(bias)
    weights = [hidden, weight, *([] if added is None else [added])]
    expected = plainly(hidden, weight, added, targets, bending)
    by_whole = torch.autograd.grad((expected * outer).sum(), weights)
    found = linear_log_probs(hidden, weight, added, targets, Kind(bending=bending), None)
    by_chunks = torch.autograd.grad((found * outer).sum(), weights)
    assert torch.allclose(found, expected, atol=1e-12)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(by_chunks, by_whole, strict=True))


def test_a_part_of_a_vocabulary_asks_the_others() -> None:
    """The other rank's part is played by what it would have sent."""
    hidden, weight, _, targets, outer = given(bias=False)
    own, other = weight.detach()[:6], weight.detach()[6:]
    far = hidden.detach() @ other.T
    chosen = far.gather(1, (targets - 6).clamp(0).unsqueeze(1)).squeeze(1).where(targets >= 6, 0)

    def largest(top: Tensor) -> None:
        top.copy_(torch.maximum(top, far.amax(1)))
        seen.append(top)

    def added(sums: Tensor) -> None:
        sums += torch.stack([(far - seen[-1].unsqueeze(1)).exp().sum(1), chosen, far.sum(1)])

    seen: list[Tensor] = []
    vocabulary = Vocabulary(CLASSES, 0, 6, lambda x: x, lambda x: x, added, largest)
    half = own.requires_grad_()
    found = linear_log_probs(hidden, half, None, targets, Kind(), vocabulary)
    expected = plainly(hidden, weight, None, targets, Bending())
    assert torch.allclose(found, expected, atol=1e-12)
    (by_part,) = torch.autograd.grad((found * outer).sum(), half)
    (by_whole,) = torch.autograd.grad((expected * outer).sum(), weight)
    assert torch.allclose(by_part, by_whole[:6], atol=1e-12)


def test_sequences_of_lazy_logits_are_summed() -> None:
    hidden, weight, _, targets, _ = given(bias=False)
    lazy = Logits(hidden[:20].view(4, 5, WIDTH), weight)
    found = lazy.log_probs(targets[:20].view(4, 5))
    expected = plainly(hidden[:20], weight, None, targets[:20], Bending()).view(4, 5).sum(1)
    assert torch.allclose(found, expected, atol=1e-12)


def test_a_target_that_there_is_none_of_is_seen() -> None:
    hidden, weight, _, targets, _ = given(bias=False)
    targets[1] = CLASSES
    with pytest.raises(IndexError, match="outside of the vocabulary of 11"):
        linear_log_probs(hidden, weight, None, targets, Kind(), None)


def test_its_gradient_is_not_differentiated() -> None:
    hidden, weight, _, targets, _ = given(bias=False)
    total = linear_log_probs(hidden, weight, None, targets, Kind(), None).sum()
    assert math.isfinite(float(total.detach()))
    with pytest.raises(RuntimeError, match="cannot be differentiated"):
        torch.autograd.grad(total, hidden, create_graph=True)
