"""Chunks that are alike, products summed up in place, and targets that there are none of."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from phalanx.kernels import linear_cross_entropy as fused
from phalanx.kernels.cross_entropy import Bending
from phalanx.kernels.linear_cross_entropy import (
    Kind,
    Product,
    Vocabulary,
    added_product,
    linear_cross_entropy,
    row_losses,
)  # fmt: skip
from phalanx.logits import Logits
from tests.test_losses import hostile


def chunks(rows: int, classes: int) -> list[slice]:
    return Product(torch.ones(classes, 1), None, torch.float32, classes).chunks(rows)


def test_chunks_are_few_and_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "LOGIT_ELEMENTS", 100)
    assert [part.stop - part.start for part in chunks(21, 10)] == [7, 7, 7]
    assert chunks(10, 10) == [slice(0, 10)]
    assert len(chunks(3, 1000)) == 3
    assert chunks(0, 10) == []
    assert chunks(5, 0) == [slice(0, 5)]


def test_parts_of_a_vocabulary_have_as_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks come to terms chunk by chunk, and the last has the fewest classes."""
    monkeypatch.setattr(fused, "LOGIT_ELEMENTS", 100)
    hidden, weight, _, targets = hostile(rows=40)
    calls: list[list[int]] = []
    for start, stop in ((0, 6), (6, 11)):
        calls.append([])

        def note(x: torch.Tensor, seen: list[int] = calls[-1]) -> None:
            seen.append(len(x))

        vocabulary = Vocabulary(11, start, 6, lambda x: x, lambda x: x, lambda x: None, note)
        Logits(hidden, weight[start:stop], None, vocabulary).cross_entropy(targets)
    assert calls[0] == calls[1]


def test_an_evaluation_forms_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    plain = fused.row_losses
    monkeypatch.setattr(fused, "row_losses", lambda *args: asked.append(args[3]) or plain(*args))
    hidden, weight, _, targets = hostile()
    with torch.no_grad():
        Logits(hidden.requires_grad_(), weight).cross_entropy(targets)
    Logits(hidden, weight).cross_entropy(targets)
    assert asked == [False, True]


def test_a_frozen_head_has_no_gradient() -> None:
    hidden, weight, bias, targets = hostile()
    Logits(hidden.requires_grad_(), weight, bias).cross_entropy(targets).backward()
    assert hidden.grad is not None
    assert weight.grad is bias.grad is None
    hidden.grad = None
    Logits(hidden.detach(), weight, bias.requires_grad_()).cross_entropy(targets).backward()
    assert bias.grad is not None
    assert hidden.grad is None


def test_a_gradient_of_a_gradient_is_refused() -> None:
    hidden, weight, _, targets = hostile()
    loss = Logits(hidden.requires_grad_(), weight).cross_entropy(targets)
    with pytest.raises(RuntimeError, match=r"Make them first: output.tensor\(\)"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_under_autocast_it_computes_as_torch_does() -> None:
    hidden, weight, _, targets = hostile()
    own, other = (weight.float().requires_grad_() for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        loss = Logits(hidden.float(), own).cross_entropy(targets)
        want = F.cross_entropy(F.linear(hidden.float(), other).view(-1, 11), targets.view(-1), reduction="sum")
    loss.backward()
    want.backward()
    assert own.grad is not None
    assert other.grad is not None
    assert own.grad.dtype == torch.float32
    assert torch.allclose(loss, want.float(), rtol=0.02)
    assert torch.allclose(own.grad, other.grad, rtol=0.05, atol=0.05 * float(other.grad.abs().max()))


def test_narrow_targets() -> None:
    hidden, weight, _, targets = hostile()
    targets = targets.clamp(min=0)
    want = Logits(hidden, weight).cross_entropy(targets)
    assert torch.equal(Logits(hidden, weight).cross_entropy(targets.to(torch.uint8)), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_products_are_added_to_a_wide_sum(dtype: torch.dtype) -> None:
    one, other = torch.randn(3, 5).to(dtype), torch.randn(5, 4).to(dtype)
    total = torch.ones(3, 4, dtype=torch.promote_types(dtype, torch.float32))
    first = added_product(None, one, other, total.dtype)
    assert added_product(total, one, other, total.dtype) is total
    assert first.dtype == total.dtype
    assert torch.allclose(first.double(), one.double() @ other.double(), rtol=0.02, atol=0.02)
    assert torch.allclose(total.double(), 1 + one.double() @ other.double(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_capped_and_smoothed(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(fused, "LOGIT_ELEMENTS", chunk)
    targets = torch.tensor([1, 0, -1, 4, 2])
    found, expected = ([torch.randn(5, 3, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)] for _ in "ab")
    for mine, theirs in zip(found, expected, strict=True):
        theirs.copy_(mine * 10)
        mine.copy_(theirs)
        mine.requires_grad_(), theirs.requires_grad_()
    kind = Kind(ignore=-1, smoothing=0.3, bending=Bending(1 / 7, 7.0))
    total = linear_cross_entropy(*found, None, targets, kind, None)
    bent = 7 * torch.tanh(F.linear(*expected) / 7)
    want = F.cross_entropy(bent, targets, ignore_index=-1, label_smoothing=0.3, reduction="sum")
    (total * 2).backward()
    (want * 2).backward()
    assert torch.allclose(total, want, rtol=1e-12)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-9, atol=1e-12)


def test_a_target_that_there_is_none_of_is_seen() -> None:
    with pytest.raises(IndexError, match="a target of 0 to 6 is outside of the vocabulary of 6"):
        linear_cross_entropy(torch.ones(2, 3), torch.ones(6, 3), None, torch.tensor([0, 6]), Kind(), None)
    for bad in (6, -5):  # as on a GPU, where nobody waits to look
        loss, _ = row_losses(torch.zeros(2, 6), torch.tensor([0, bad]), Kind(), False, None)
        assert math.isnan(loss)
    loss, _ = row_losses(torch.zeros(2, 6), torch.tensor([0, -100]), Kind(), False, None)
    assert float(loss) == pytest.approx(math.log(6))
