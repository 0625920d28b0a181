"""Losses: a sum and a count, equal to torch's; logits that wait until somebody needs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import phalanx
from phalanx import Layout, Logits, Loss, WrongUse, losses
from phalanx.kernels import linear_cross_entropy
from tests.parity import PRIME, TOLERANCE, HostileLanguage, Trace, difference, reference, spread_run
from tests.ranks import Ranks


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


def gradients(of: Tensor, *leaves: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(of, leaves, retain_graph=True))


def same(found: Tensor, want: Tensor) -> bool:
    """Also where both are not numbers: torch divides by 0 where nothing counts."""
    return found.shape == want.shape and torch.allclose(found, want, rtol=1e-10, atol=1e-12, equal_nan=True)


@st.composite
def classified(draw: st.DrawFn) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Scores and targets of any shape that torch takes, mostly with dims of one size, and options."""
    classes = draw(st.integers(1, 4))
    places = draw(st.lists(st.integers(1, 4), max_size=4))
    source = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    scores = torch.randn(*places[:1], classes, *places[1:], dtype=torch.float64, generator=source) * 3
    options: dict[str, Any] = {"label_smoothing": draw(st.sampled_from([0.0, 0.1, 1.0]))}
    if draw(st.booleans()):
        options["weight"] = torch.rand(classes, dtype=torch.float64, generator=source)
    if draw(st.booleans()):
        return scores, torch.randn(scores.shape, dtype=torch.float64, generator=source).softmax(0), options
    targets = torch.randint(0, classes, places, generator=source)
    options["ignore_index"] = draw(st.sampled_from([-100, -1, 0, 1, 255]))
    left_out = torch.rand(places, generator=source) < 0.3
    return scores, targets.where(~left_out, options["ignore_index"]), options


@given(classified(), st.integers(0, 4))
def test_cross_entropy_is_torchs_in_any_shape_and_with_any_option(
    made: tuple[Tensor, Tensor, dict[str, Any]], place: int
) -> None:
    """The values and gradients, with classes where torch has them, and in any other dim if that is asked for."""
    scores, targets, options = made
    place = min(place, scores.ndim - 1)
    second = min(1, scores.ndim - 1)
    found, want = (scores.clone().requires_grad_() for _ in range(2))
    mean = F.cross_entropy(want, targets, **options)
    moved = targets.movedim(second, place) if targets.is_floating_point() else targets
    for loss in (
        losses.cross_entropy(found, targets, **options),
        losses.cross_entropy(found.movedim(second, place), moved, dim=place, **options),
        losses.cross_entropy(found.movedim(second, place), moved, dim=place - scores.ndim, **options),
    ):
        assert same(loss.total / loss.count, mean)
        if loss.count:
            assert same(*(gradients(m, x)[0] for m, x in ((loss.total / loss.count, found), (mean, want))))
        else:
            assert loss.total == 0


@given(classified(), st.integers(1, 3))
def test_totals_and_counts_of_parts_add_up(made: tuple[Tensor, Tensor, dict[str, Any]], cut: int) -> None:
    scores, targets, options = made
    if scores.ndim < 2:
        return
    parts = [
        losses.cross_entropy(s, t, **options) for s, t in ((scores[:cut], targets[:cut]), (scores[cut:], targets[cut:]))
    ]
    total, count = (sum(float(getattr(part, name)) for part in parts) for name in ("total", "count"))
    whole = losses.cross_entropy(scores, targets, **options)
    assert (total, count) == pytest.approx((float(whole.total), float(whole.count)))


@pytest.mark.parametrize("chunk", [1, 30, 1 << 20])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignored", [-100, 0, 11, 255])
def test_lazy_logits_with_weights_are_torchs(monkeypatch, chunk: int, smoothing: float, ignored: int) -> None:
    monkeypatch.setattr(linear_cross_entropy, "LOGIT_ELEMENTS", chunk)
    *leaves, targets = hostile()
    targets = targets.where(targets >= 0, ignored)
    weight = torch.linspace(0, 2, 11, dtype=torch.float64)
    found, expected = ([t.clone().requires_grad_() for t in leaves] for _ in range(2))
    options: dict[str, Any] = {"weight": weight, "ignore_index": ignored, "label_smoothing": smoothing}
    loss = losses.cross_entropy(30 * torch.tanh(Logits(*found) / 30), targets, **options)
    logits = 30 * torch.tanh(F.linear(*expected) / 30)
    mean = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)
    assert same(loss.total / loss.count, mean)
    for mine, theirs in zip(gradients(loss.total / loss.count, *found), gradients(mean, *expected), strict=True):
        assert same(mine, theirs)


def test_weights_of_classes_never_make_lazy_logits(monkeypatch) -> None:
    hidden, weight, bias, targets = hostile()
    monkeypatch.setattr(Logits, "tensor", lambda self: pytest.fail("they were made"))
    assert (
        losses.cross_entropy(Logits(hidden, weight, bias), targets, weight=[0.5] * 11).count
        == 0.5 * (targets >= 0).sum()
    )


def test_logits_have_their_classes_last_however_they_are_kept() -> None:
    """Also where sizes are equal, and where they have been made: which of these is so depends on the layout."""
    source = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(s, dtype=torch.float64, generator=source) for s in ((7, 7, 3), (7, 3)))
    targets, rows = torch.randint(0, 7, (7, 7), generator=source), torch.randint(0, 7, (7, 6), generator=source)
    want = F.cross_entropy((hidden @ head.T).flatten(0, 1), targets.flatten())
    want_rows = F.cross_entropy((hidden @ head.T)[:, 1:].flatten(0, 1), rows.flatten())
    lazy, made = Logits(hidden, head), Logits(hidden, head)
    made = made.computed(made.tensor())
    for logits in (lazy, made):
        for changed in (logits, logits.float().to(torch.float64), logits.view(7, 7, 7), (logits / 2) * 2, logits[:]):
            for dim in (None, -1, 2):
                found = losses.cross_entropy(changed, targets, dim=dim)
                assert torch.allclose(found.total / found.count, want, rtol=1e-5)
        found = losses.cross_entropy(logits[:, 1:], rows)
        assert same(found.total / found.count, want_rows)
        second = losses.cross_entropy(logits, targets, dim=1)
        assert same(second.total / second.count, F.cross_entropy(hidden @ head.T, targets))


def test_a_focal_loss_is_a_cross_entropy_of_what_is_hard() -> None:
    scores = torch.randn(4, 3, 5, dtype=torch.float64).requires_grad_()
    targets, weight = torch.randint(0, 3, (4, 5)), torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
    targets[0, :2] = 255
    options: dict[str, Any] = {"weight": weight, "ignore_index": 255}
    plain, found = losses.cross_entropy(scores, targets, **options), losses.focal(scores, targets, gamma=0.0, **options)
    assert same(found.total, plain.total)
    assert found.count == plain.count
    known = targets != 255
    p = scores.softmax(1).movedim(1, -1)[known].gather(1, targets[known].unsqueeze(1)).squeeze(1)
    by_hand = -weight[targets[known]] * (1 - p) ** 1.5 * p.log()
    for loss in (
        losses.focal(scores, targets, gamma=1.5, **options),
        losses.focal(scores.movedim(1, -1), targets, gamma=1.5, dim=-1, **options),
    ):
        assert same(loss.total, by_hand.sum())
        assert same(*(gradients(total, scores)[0] for total in (loss.total, by_hand.sum())))


@pytest.mark.parametrize("alpha", [0.25, None])
def test_a_binary_focal_loss_is_that_of_detectors(alpha: float | None) -> None:
    scores = (torch.randn(4, 5, dtype=torch.float64) * 3).requires_grad_()
    for targets in (torch.randint(0, 2, (4, 5)).double(), torch.rand(4, 5, dtype=torch.float64)):
        p = scores.sigmoid()
        right = p * targets + (1 - p) * (1 - targets)
        terms = (1 - right) ** 2 * F.binary_cross_entropy_with_logits(scores, targets, reduction="none")
        if alpha is not None:
            terms = terms * (alpha * targets + (1 - alpha) * (1 - targets))
        found = losses.binary_focal(scores, targets, alpha=alpha)
        assert same(found.total, terms.sum())
        assert found.count == 20
        assert same(*(gradients(total, scores)[0] for total in (found.total, terms.sum())))


def test_focal_losses_of_what_is_certain_have_gradients() -> None:
    scores = torch.tensor([[900.0, -900.0], [-900.0, 900.0]], requires_grad=True)
    for loss in (
        losses.focal(scores, torch.tensor([0, 1]), gamma=0.5), losses.focal(scores, torch.tensor([1, -100]), gamma=0.5),
        losses.binary_focal(scores, (scores > 0).float(), gamma=0.5),
    ):  # fmt: skip
        assert torch.isfinite(gradients(loss.total, scores)[0]).all()


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (losses.mean_squared_error, F.mse_loss),
        (losses.l1, F.l1_loss),
        (lambda x, y: losses.huber(x, y, delta=0.3), lambda x, y: F.huber_loss(x, y, delta=0.3)),
        (lambda x, y: losses.smooth_l1(x, y, beta=0.3), lambda x, y: F.smooth_l1_loss(x, y, beta=0.3)),
        (
            lambda x, y: losses.kl_div(x.log_softmax(1), y.softmax(1)),
            lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
        ),
        (
            lambda x, y: losses.kl_div(x.log_softmax(1), y.log_softmax(1), log_target=True),
            lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
        ),
        (
            lambda x, y: losses.binary_cross_entropy(x, y.sigmoid(), weight=y[:, :1].exp(), pos_weight=y[0].exp()),
            lambda x, y: F.binary_cross_entropy_with_logits(
                x, y.sigmoid(), weight=y[:, :1].exp(), pos_weight=y[0].exp()
            ),
        ),
        (
            lambda x, y: losses.binary_cross_entropy(x, (y > 0).long(), pos_weight=3.0),
            lambda x, y: F.binary_cross_entropy_with_logits(x, (y > 0).double(), pos_weight=torch.tensor(3.0)),
        ),
    ],
)  # fmt: skip
def test_losses_of_pairs_are_torchs(ours: Callable[..., Loss], torchs: Callable[..., Tensor]) -> None:
    x, y = (torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    found, want = ours(x, y.detach()), torchs(x, y.detach())
    assert same(found.total / found.count, want)
    assert same(gradients(found.total / found.count, x)[0], gradients(want, x)[0])


def test_places_that_are_ignored_do_not_count() -> None:
    scores, targets = torch.randn(3, 4, dtype=torch.float64), torch.tensor([[0, 1, 255, 1]] * 3)
    for loss in (losses.binary_cross_entropy, losses.binary_focal):
        found, want = loss(scores, targets, ignore_index=255), loss(scores[:, [0, 1, 3]], targets[:, [0, 1, 3]])
        assert same(found.total, want.total)
        assert found.count == want.count == 9


def test_narrow_outputs_are_summed_wide() -> None:
    output, targets = torch.randn(64, 9).bfloat16(), torch.randint(0, 9, (64,))
    assert losses.cross_entropy(output, targets).total.dtype == torch.float32
    regression = losses.mean_squared_error(torch.ones(3).bfloat16(), torch.zeros(3))
    assert (regression.total, regression.count) == (3.0, 3)
    assert losses.binary_cross_entropy(torch.zeros(2), torch.ones(2)).total == pytest.approx(1.3863, abs=1e-4)


@pytest.mark.parametrize(
    "loss", [losses.mean_squared_error, losses.l1, losses.huber, losses.smooth_l1, losses.kl_div,
             losses.binary_cross_entropy, losses.binary_focal, losses.binary_dice],
)  # fmt: skip
def test_nothing_is_broadcast(loss: Callable[..., Loss]) -> None:
    with pytest.raises(WrongUse, match="do not belong together"):
        loss(torch.zeros(4, 1), torch.zeros(4))


def test_what_a_loss_does_not_know_is_refused() -> None:
    soft = torch.full((4, 3), 1 / 3)
    with pytest.raises(WrongUse, match=r"ignore_index=0 is for classes.*Leave it out"):
        losses.cross_entropy(torch.zeros(4, 3), soft, ignore_index=0)
    with pytest.raises(WrongUse, match=r"write phalanx.losses.binary_focal\(output, targets\)"):
        losses.focal(torch.zeros(4, 3), soft)
    with pytest.raises(IndexError, match="out of bounds"):
        losses.cross_entropy(torch.zeros(4, 3), torch.full((4,), 3))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.bool])
def test_whole_numbers_of_any_dtype_are_classes(dtype: torch.dtype) -> None:
    scores, targets = torch.randn(4, 3), torch.tensor([1, 0, 1, 1])
    assert same(losses.cross_entropy(scores, targets.to(dtype)).total, losses.cross_entropy(scores, targets).total)


@dataclass
class Weighted(HostileLanguage):
    """A language model with a weight for each token, in the ways in which that is computed."""

    smoothing: float = 0.0
    ignored: int = -100
    made: bool = False

    def loss(self, output: Any, batch: dict[str, Tensor]) -> Loss:
        if self.made:
            output = output.tensor() if isinstance(output, Logits) else output
        weight = torch.arange(PRIME) / 10
        targets = batch["targets"].where(batch["targets"] >= 0, self.ignored)
        return losses.cross_entropy(
            output, targets, weight=weight, ignore_index=self.ignored, label_smoothing=self.smoothing, dim=-1
        )


def run(task: phalanx.Task, layouts: list[str]) -> list[Trace]:
    return [spread_run(task, Layout.parse(layout)) for layout in layouts]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("smoothing", "ignored", "made"), [(0.0, -100, False), (0.1, 3, False), (0.0, 3, True)])
def test_weights_of_classes_under_every_layout(
    ranks: Ranks, smoothing: float, ignored: int, made: bool, world: int
) -> None:
    """Where ranks share the vocabulary, or positions."""
    task = Weighted(smoothing=smoothing, ignored=ignored, made=made)
    expected = reference(task)
    layouts = ["tp=2", "cp=2,micro_batch=8", "pp=2", "fsdp=2"] if world == 2 else ["tp=2,cp=2", "fsdp=2,tp=2"]
    for layout, found in zip(layouts, ranks(world, run, task, layouts)[0], strict=True):
        error, where = difference(found, expected)
        assert error < TOLERANCE, (layout, where)
