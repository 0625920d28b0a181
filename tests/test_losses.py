"""Losses: a sum and a count, equal to torch's; logits that wait until somebody needs them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from phalanx import Logits, WrongUse, losses
from phalanx.kernels import linear_cross_entropy


def hostile(rows: int = 7, width: int = 5, vocabulary: int = 11) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, rows, width, dtype=torch.float64, generator=generator) * 3
    weight = torch.randn(vocabulary, width, dtype=torch.float64, generator=generator) * 3
    bias = torch.randn(vocabulary, dtype=torch.float64, generator=generator)
    targets = torch.randint(0, vocabulary, (2, rows), generator=generator)
    targets[0, ::2] = -100
    return hidden, weight, bias, targets


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("chunk", [1, 30, 1 << 20])
def test_lazy_logits_give_torchs_loss_and_gradients(monkeypatch, smoothing: float, with_bias: bool, chunk: int) -> None:
    monkeypatch.setattr(linear_cross_entropy, "LOGIT_ELEMENTS", chunk)
    *leaves, targets = hostile()
    found, expected = ([t.clone().requires_grad_() for t in leaves] for _ in range(2))
    bias = found[2] if with_bias else None
    loss = losses.cross_entropy(Logits(found[0], found[1], bias), targets, label_smoothing=smoothing)
    (loss.total * 0.3).backward()
    logits = F.linear(expected[0], expected[1], expected[2] if with_bias else None)
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", label_smoothing=smoothing)
    (total * 0.3).backward()
    assert torch.allclose(loss.total, total, rtol=1e-12)
    assert int(loss.count) == (targets != -100).sum()
    for mine, theirs in list(zip(found, expected, strict=True))[: 3 if with_bias else 2]:
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)


def test_all_targets_ignored_is_nothing_and_not_nan() -> None:
    hidden, weight, _, targets = hostile()
    loss = losses.cross_entropy(Logits(hidden.requires_grad_(), weight), torch.full_like(targets, -100))
    loss.total.backward()
    assert loss.total == loss.count == 0
    assert not hidden.grad.any()


def test_what_is_looked_at_without_gradients_has_them_in_the_loss() -> None:
    hidden, weight, _, targets = hostile()
    lazy = Logits(hidden.requires_grad_(), weight.requires_grad_())
    with torch.no_grad():
        lazy.argmax(-1)
    losses.cross_entropy(lazy, targets).total.backward()
    assert hidden.grad.any()
    assert weight.grad.any()


def test_logits_of_a_call_without_gradients_have_none() -> None:
    hidden, weight, _, targets = hostile()
    with torch.no_grad():
        lazy = Logits(hidden.requires_grad_(), weight.requires_grad_())
    assert not losses.cross_entropy(lazy, targets).total.requires_grad
    assert not lazy.tensor().requires_grad


def test_plain_code_on_lazy_logits_materialises_them() -> None:
    hidden, weight, _, targets = hostile()
    lazy, plain = Logits(hidden, weight), hidden @ weight.T
    assert lazy.shape == plain.shape
    assert torch.allclose(
        F.cross_entropy(lazy.flatten(0, 1), targets.flatten()), F.cross_entropy(plain.flatten(0, 1), targets.flatten())
    )
    assert torch.equal(torch.softmax(lazy, -1), torch.softmax(plain, -1))
    assert torch.equal(lazy[:, -1].argmax(-1), plain[:, -1].argmax(-1))
    assert torch.equal(lazy * 2 + 1, plain * 2 + 1)
    assert torch.equal(torch.stack([lazy, lazy])[0], plain)


def test_classes_last_or_second() -> None:
    image = torch.randn(2, 3, 4, 4)
    targets = torch.randint(0, 3, (2, 4, 4))
    assert torch.allclose(losses.cross_entropy(image, targets).total, F.cross_entropy(image, targets, reduction="sum"))
    last = losses.cross_entropy(image.movedim(1, -1), targets)
    assert torch.allclose(last.total, F.cross_entropy(image, targets, reduction="sum"))


def test_narrow_outputs_are_summed_wide() -> None:
    output, targets = torch.randn(64, 9).bfloat16(), torch.randint(0, 9, (64,))
    assert losses.cross_entropy(output, targets).total.dtype == torch.float32
    regression = losses.mean_squared_error(torch.ones(3).bfloat16(), torch.zeros(3))
    assert (regression.total, regression.count) == (3.0, 3)
    assert losses.binary_cross_entropy(torch.zeros(2), torch.ones(2)).total == pytest.approx(1.3863, abs=1e-4)


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(WrongUse, match=r"\(4, 3\).*\(5,\)"):
        losses.cross_entropy(torch.zeros(4, 3), torch.zeros(5, dtype=torch.long))
    with pytest.raises(WrongUse, match="do not belong together"):
        losses.mean_squared_error(torch.zeros(4, 1), torch.zeros(4))
