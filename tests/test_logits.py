"""Lazy logits: what is done to them is what is done to a tensor, and common ways to a loss never make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx
from phalanx import Layout, Logits
from phalanx.train.widened import Float64
from tests.parity import TOLERANCE, HostileLanguage, Trace, difference, reference, spread_run
from tests.ranks import Ranks
from tests.test_losses import hostile


def shifted(logits: Any, targets: Tensor) -> Tensor:
    """As Hugging Face's examples do."""
    some = logits[..., :-1, :].contiguous()
    return nn.CrossEntropyLoss()(some.view(-1, some.size(-1)), targets[..., 1:].contiguous().view(-1))


def padded(logits: Any, targets: Tensor) -> Tensor:
    """As Hugging Face's models do themselves."""
    logits = logits.float()
    targets = F.pad(targets, (0, 1), value=-100)[..., 1:].contiguous().view(-1).to(logits.device)
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets, ignore_index=-100, reduction="sum")


def capped(logits: Any, targets: Tensor) -> Tensor:
    logits = logits / 30.0
    logits = torch.tanh(logits)
    logits = logits * 30.0
    return F.cross_entropy(logits.reshape((-1, 11)), targets.view(-1), label_smoothing=0.1)


def scaled(logits: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy((0.25 * logits)[:, 1:].reshape(-1, 11), targets[:, 1:].flatten(), reduction="sum")


WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "shifted": shifted, "padded": padded, "capped": capped, "scaled": scaled,
}  # fmt: skip


class Unmakable(Logits):
    def tensor(self) -> Tensor:
        raise AssertionError("they were made")


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_common_ways_to_a_loss_never_make_them(way: Callable[[Any, Tensor], Tensor]) -> None:
    *leaves, targets = hostile()
    found, expected = ([t.clone().requires_grad_() for t in leaves] for _ in range(2))
    loss = way(Unmakable(*found), targets)
    (loss * 0.3).backward()
    want = way(F.linear(*expected), targets)
    (want * 0.3).backward()
    assert torch.allclose(loss.double(), want.double(), rtol=1e-6 if way is padded else 1e-12)
    for mine, theirs in zip(found, expected, strict=True):
        tolerance = 1e-5 if way is padded else 1e-10
        assert torch.allclose(mine.grad, theirs.grad, rtol=tolerance, atol=tolerance / 100)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[:, -1], lambda x: x[0], lambda x: x[..., 2], lambda x: x[:, :, 1:3], lambda x: x[1, 2:5],
        lambda x: x[..., :], lambda x: x[None], lambda x: x[torch.tensor([1])], lambda x: x.view(-1), lambda x: x.T,
        lambda x: x.reshape(2, -1, 11), lambda x: x.reshape(-1, 22), lambda x: x.float(), lambda x: x / 3 + 1,
        lambda x: x / torch.tensor(2.0), lambda x: 2 * x * 3, lambda x: torch.tanh(x / 4) * 5 * 2,
        lambda x: torch.tanh(torch.tanh(x)), lambda x: x * True, lambda x: x.to(torch.float32).softmax(-1),
        lambda x: x.to("cpu"), lambda x: x[:, 1:][:, :2].argmax(-1),
    ],
)  # fmt: skip
def test_all_else_is_a_tensors(change: Callable[[Any], Any]) -> None:
    hidden, weight, bias, _ = hostile()
    found, want = change(Logits(hidden, weight, bias)), change(F.linear(hidden, weight, bias))
    found = found.tensor() if isinstance(found, Logits) else found
    assert found.dtype == want.dtype
    assert found.shape == want.shape
    assert torch.allclose(found, want, rtol=1e-12)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.contiguous(memory_format=torch.contiguous_format), lambda x: x.reshape(shape=(-1, 11)),
        lambda x: x.view(torch.int64), lambda x: x[()], lambda x: torch.tanh(input=x), lambda x: x.view(2, 7, 1, 11),
        lambda x: x.to(torch.float64), lambda x: x.to(torch.bfloat16), lambda x: 30 * torch.tanh(x.float() / 30),
    ],
)  # fmt: skip
def test_in_whatever_way_it_is_written(change: Callable[[Any], Any]) -> None:
    hidden, weight, bias, _ = hostile()
    found, want = change(Logits(hidden, weight, bias)), change(F.linear(hidden, weight, bias))
    found = found.tensor() if isinstance(found, Logits) else found
    assert found.dtype == want.dtype
    assert torch.allclose(found.double(), want.double(), rtol=1e-6)


def test_wide_of_narrow_is_bent_wide() -> None:
    hidden, weight, _, _ = hostile()
    lazy = Logits(hidden.bfloat16(), weight.bfloat16()).float() / 0.7
    plain = F.linear(hidden.bfloat16(), weight.bfloat16()).float() / 0.7
    assert torch.allclose(lazy.tensor(), plain, rtol=1e-6)


def test_a_cast_that_a_proof_leaves_out_is_left_out() -> None:
    """As of a tensor: what a proof computes stays in float64, whatever the loss casts to."""
    hidden, weight, _, targets = hostile()
    lazy = Unmakable(hidden.double(), weight.double())
    with Float64():
        assert lazy.float().dtype == lazy.to(torch.float32).dtype == torch.float64
        assert padded(lazy, targets).dtype == torch.float64
    assert lazy.float().dtype == torch.float32


def test_views_share_what_is_made_and_changed() -> None:
    hidden, weight, _, targets = hostile()
    for logits in (lazy := Logits(hidden, weight), plain := hidden @ weight.T):
        flat = logits.view(-1, 11)
        logits[..., 3] = -30.0
        some = logits[:, -1]
        some[:, 4] = -40.0
        if logits is lazy:
            found = F.cross_entropy(flat, targets.view(-1))
    assert torch.allclose(found, F.cross_entropy(plain.view(-1, 11), targets.view(-1)))


def test_what_was_made_and_changed_counts() -> None:
    hidden, weight, _, targets = hostile()
    lazy, plain = Logits(hidden, weight), hidden @ weight.T
    for logits in (lazy, plain):
        logits[:, :, 3] = -30.0
    assert torch.allclose(shifted(lazy, targets), shifted(plain, targets))


def test_targets_and_weights_that_chunks_do_not_know_are_torchs() -> None:
    hidden, weight, _, targets = hostile()
    lazy, plain = Logits(hidden, weight).view(-1, 11), (hidden @ weight.T).view(-1, 11)
    classes, rows = torch.rand(11, dtype=torch.float64), targets.view(-1)
    soft = torch.softmax(plain.detach().flip(-1), -1)
    for found, want in (
        (F.cross_entropy(lazy, rows, weight=classes), F.cross_entropy(plain, rows, weight=classes)),
        (F.cross_entropy(lazy, rows, reduction="none"), F.cross_entropy(plain, rows, reduction="none")),
        (F.cross_entropy(lazy, soft), F.cross_entropy(plain, soft)),
    ):
        assert torch.allclose(found, want)
    with pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(lazy, rows[1:])
    with pytest.raises(IndexError, match="outside of the vocabulary of 11"):
        F.cross_entropy(Logits(hidden, weight).view(-1, 11), rows.where(rows != 4, 11))


def test_what_is_not_rows_is_the_tensors() -> None:
    hidden, weight = torch.randn(2, 3, 4), torch.randn(5, 4)
    logits, made = Logits(hidden, weight), F.linear(hidden, weight)
    for key in ((0, 0, 3, ...), (0, ..., 3), (..., 3), (0, 0, slice(1, 3), ...)):
        assert torch.equal(_tensor(Logits(hidden, weight)[key]), made[key]), key
    for key in ((0, ...), (..., slice(None)), (0, 1, slice(None), ...), (slice(0, 1),)):
        found = Logits(hidden, weight)[key]
        assert isinstance(found, Logits), key
        assert torch.equal(found.tensor(), made[key]), key
    assert torch.equal(_tensor(logits.to(torch.long)), made.to(torch.long))
    assert torch.equal(2**logits, 2**made)
    assert torch.equal(logits % 2, made % 2)
    whole = Logits(hidden, weight)
    rows = whole[:, :-1]
    whole /= 2
    assert torch.equal(_tensor(rows), made[:, :-1] / 2)


def _tensor(value: Any) -> torch.Tensor:
    return value.tensor() if isinstance(value, Logits) else value


@dataclass
class Sliced(HostileLanguage):
    """Shifted in the loss, as people write it, without a word of where the classes are."""

    def loss(self, output: Any, batch: dict[str, Tensor]) -> phalanx.Loss:
        assert isinstance(output[:, :-1].contiguous(), Logits)
        return phalanx.losses.cross_entropy((output / 2)[:, :-1].contiguous(), batch["targets"][:, 1:])


def run(task: phalanx.Task, layouts: list[str]) -> list[Trace]:
    return [spread_run(task, Layout.parse(layout)) for layout in layouts]


def test_they_are_logits_under_every_layout(ranks: Ranks) -> None:
    layouts = ["dp=2", "cp=2", "tp=2", "fsdp=2,micro_batch=8"]
    expected = reference(Sliced())
    for layout, found in zip(layouts, ranks(2, run, Sliced(), layouts)[0], strict=True):
        error, where = difference(found, expected)
        assert error < TOLERANCE, (layout, where)


def test_they_are_logits_in_every_precision() -> None:
    """Those in float16 are made before the loss, since it needs its scale first."""
    for precision in ("fp16", "bf16", "fp32"):
        with phalanx.Engine(Sliced(precision=precision, steps=1), Layout(), device="cpu") as engine:
            assert engine.step(next(engine.batches())).loss > 0
