"""Gradients of a head in 8 bits: near the wide ones, however many chunks there are, and left out where nothing fits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels import fp8_head, linear_cross_entropy
from phalanx.kernels.cross_entropy import Bending
from phalanx.kernels.linear_cross_entropy import Kind
from tests.kernels.test_fp8 import off


def gradients(rows: int, classes: int, kind: Kind) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """The loss, its gradients by hidden states and weight; and torch's, in float32."""
    generator = torch.Generator().manual_seed(rows)
    hidden, weight = (torch.randn(n, 32, generator=generator).bfloat16() for n in (rows, classes))
    targets = torch.randint(0, classes, (rows,), generator=generator)
    targets[1::7] = -100
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    loss = linear_cross_entropy.linear_cross_entropy(*leaves, None, targets, kind, None)
    (loss / 3).backward()
    wide = [tensor.float().requires_grad_() for tensor in (hidden, weight)]
    logits = kind.bending(F.linear(*wide))
    expected = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=kind.smoothing)
    (expected / 3).backward()
    found = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return loss.detach(), *found, [expected.detach(), *(leaf.grad for leaf in wide if leaf.grad is not None)]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("elements", [1 << 20, 16 * 48, 32 * 48])
def test_gradients_are_near_wide_ones(monkeypatch: pytest.MonkeyPatch, elements: int, smoothing: float) -> None:
    """In one chunk, in twelve of which four are kept, and in six."""
    monkeypatch.setattr(linear_cross_entropy, "LOGIT_ELEMENTS", elements)
    loss, by_hidden, by_weight, expected = gradients(176, 48, Kind(smoothing=smoothing, narrow=True))
    assert off(loss, expected[0]) < 0.01
    assert 0.01 < off(by_hidden, expected[1]) < 0.1
    assert 0.01 < off(by_weight, expected[2]) < 0.1


@pytest.mark.parametrize(("rows", "classes", "kind"), [
    (170, 48, Kind(narrow=True)),
    (176, 47, Kind(narrow=True)),
    (176, 48, Kind(bending=Bending(1 / 30, 30.0), narrow=True)),
])  # fmt: skip
def test_what_does_not_fit_is_wide(rows: int, classes: int, kind: Kind) -> None:
    """Sizes that are no multiples of 16, and logits whose gradients have no bound that is known."""
    _, by_hidden, by_weight, expected = gradients(rows, classes, kind)
    assert off(by_hidden, expected[1]) < 0.01
    assert off(by_weight, expected[2]) < 0.01


def test_a_rank_without_classes_has_nothing_to_do() -> None:
    assert not fp8_head.HeadGradients(torch.ones(16, 32), torch.ones(0, 32), [slice(0, 16)]).fit


def test_a_gradient_by_a_logit_fits_its_scale() -> None:
    assert fp8_head.SCALE < torch.finfo(torch.float8_e5m2).max < 2 * fp8_head.SCALE
