"""Soft Dice: what the formula says, and over the global batch the same number at any layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx import Layout, Loss, WrongUse, losses
from tests.parity import TOLERANCE, HostileVision, Trace, difference, reference, spread_run
from tests.ranks import Ranks


def by_hand(scores: Tensor, targets: Tensor, smooth: float, ignored: int) -> Tensor:
    """The Dice of each class over all places of some samples, ``[batch, classes, places]``, in a loop."""
    found = []
    for number in range(scores.shape[1]):
        overlap = both = torch.zeros((), dtype=scores.dtype)
        for row, target in zip(scores.softmax(1), targets, strict=True):
            for place in range(len(target)):
                if target[place] == ignored:
                    continue
                overlap = overlap + row[number, place] * (target[place] == number)
                both = both + row[number, place] + (target[place] == number)
        found.append((2 * overlap + smooth) / (both + smooth))
    return torch.stack(found)


@pytest.mark.parametrize("ignored", [-100, 255, 0])
@pytest.mark.parametrize("smooth", [1.0, 1e-5])
def test_dice_of_classes(smooth: float, ignored: int) -> None:
    source = torch.Generator().manual_seed(0)
    scores = torch.randn(4, 3, 6, dtype=torch.float64, generator=source).requires_grad_()
    targets = torch.randint(0, 3, (4, 6), generator=source)
    targets[0, 2:4] = ignored
    options: dict[str, Any] = {"smooth": smooth, "ignore_index": ignored}
    weight = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    each = torch.stack([by_hand(scores[i : i + 1], targets[i : i + 1], smooth, ignored) for i in range(4)])
    whole = by_hand(scores, targets, smooth, ignored)
    for loss, want in (
        (losses.dice(scores, targets, **options), (1 - each.mean(1)).mean()),
        (losses.dice(scores, targets, over="batch", **options), 1 - whole.mean()),
        (losses.dice(scores, targets, weight=weight, **options), (1 - (each * weight).sum(1) / 3).mean()),
        (losses.dice(scores.movedim(1, 2), targets, dim=-1, over="batch", **options), 1 - whole.mean()),
        (losses.dice(scores.unflatten(2, (2, 3)), targets.unflatten(1, (2, 3)), **options), (1 - each.mean(1)).mean()),
    ):
        assert torch.allclose(loss.total / loss.count, want, rtol=1e-12)
        found, wanted = (torch.autograd.grad(x, scores, retain_graph=True)[0] for x in (loss.total / loss.count, want))
        assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("over", ["sample", "batch"])
def test_dice_of_masks_is_that_of_two_classes(over: Any) -> None:
    """Whose scores are 0 and the mask's: of the second class alone."""
    scores, mask = torch.randn(4, 5, 6, dtype=torch.float64), torch.rand(4, 5, 6) < 0.4
    two = torch.stack([torch.zeros_like(scores), scores], 1)
    want = losses.dice(two, mask.long(), weight=[0, 1], over=over)
    for found in (
        losses.binary_dice(scores, mask.double(), over=over),
        losses.binary_dice(scores.unsqueeze(1), mask.unsqueeze(1), over=over),
        losses.binary_dice(scores.unsqueeze(1), mask.unsqueeze(1).float(), over=over, dim=1),
        losses.binary_dice(scores.flatten(1), mask.flatten(1), over=over, ignore_index=7),
    ):
        assert torch.allclose(found.total, want.total, rtol=1e-12)
        assert found.count == want.count == 4
    channels = losses.binary_dice(scores, mask.float(), over=over, dim=1)
    assert torch.allclose(
        channels.total / 4,
        torch.stack([losses.binary_dice(scores[:, i], mask[:, i], over=over).total / 4 for i in range(5)]).mean(),
    )
    part = losses.binary_dice(scores, mask.long().where(torch.arange(6) < 4, 255), over=over, ignore_index=255)
    assert torch.allclose(part.total, losses.binary_dice(scores[..., :4], mask[..., :4], over=over).total)


def test_probabilities_of_classes_are_targets_if_the_dim_is_given() -> None:
    scores, targets = torch.randn(4, 3, 5, dtype=torch.float64), torch.randint(0, 3, (4, 5))
    soft = nn.functional.one_hot(targets, 3).movedim(-1, 1).double()
    assert torch.allclose(losses.dice(scores, soft, dim=1).total, losses.dice(scores, targets).total)


def test_samples_of_which_nothing_counts_do_not_count() -> None:
    scores, targets = torch.randn(3, 2, 5).requires_grad_(), torch.randint(0, 2, (3, 5))
    targets[1] = 255
    found = losses.dice(scores, targets, ignore_index=255, smooth=0.0)
    want = losses.dice(scores[[0, 2]], targets[[0, 2]], smooth=0.0)
    assert torch.allclose(found.total, want.total)
    assert found.count == 2
    (gradient,) = torch.autograd.grad(found.total, scores)
    assert torch.isfinite(gradient).all()
    assert not gradient[1].any()


def test_what_is_nowhere_and_not_predicted_is_right() -> None:
    certain = torch.tensor([[[900.0] * 4, [-900.0] * 4]])
    for smooth in (0.0, 1.0):
        assert losses.dice(certain, torch.zeros(1, 4, dtype=torch.long), smooth=smooth).total == 0
        assert losses.binary_dice(-certain[:, 0], torch.zeros(1, 4), smooth=smooth).total == 0


@pytest.mark.parametrize(
    ("output", "targets", "options", "told"),
    [
        ((4, 3, 5), torch.zeros(4, 3, 5), {}, r"binary_dice\(output, targets\).*targets.argmax\(1\).*write dim=1"),
        ((4, 1, 5), torch.zeros(4, 5).long(), {}, r"one class: its softmax is 1 everywhere.*binary_dice"),
        ((4, 5, 3), torch.zeros(4, 5).long(), {}, "write dim=-1"),
        ((3,), torch.zeros(()).long(), {}, "samples in the first dim"),
        ((4, 3, 5), torch.zeros(4, 5).long(), {"over": "all"}, "over='sample' or over='batch'"),
        ((4, 3, 5), torch.zeros(4, 5).long(), {"weight": [1, 2]}, "the output has 3 classes"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(output: Any, targets: Tensor, options: Any, told: str) -> None:
    with pytest.raises(WrongUse, match=told):
        losses.dice(torch.zeros(output), targets, **options)


def test_classes_and_channels_that_there_are_none_of_are_refused() -> None:
    with pytest.raises(IndexError, match="targets of 0 to 3 are out of range of 3 classes"):
        losses.dice(torch.zeros(4, 3, 2), torch.tensor([[0, 3]] * 4))
    with pytest.raises(WrongUse, match="no dim of channels"):
        losses.binary_dice(torch.zeros(4, 3), torch.zeros(4, 3), dim=0)


@dataclass
class Pixels(HostileVision):
    """Classes of pixels, rare ones too; some do not count, and of one sample none."""

    kind: str = "batch"

    def model(self) -> nn.Module:
        last = nn.Conv2d(6, 1 if self.kind == "masks" else 4, 1)
        return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.Tanh(), nn.Dropout(0.1), last)

    def data(self) -> phalanx.data.Arrays:
        classes = np.random.default_rng(1).choice([0, 1, 2, 3, 255], p=[0.7, 0.2, 0.04, 0.01, 0.05], size=(47, 5, 5))
        classes[5] = 255
        return phalanx.data.Arrays(image=self.source, classes=classes)

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Loss:
        classes = batch["classes"]
        if self.kind == "weights":
            return losses.cross_entropy(
                output, classes, weight=(0.1, 0.3, 2.0, 5.0), ignore_index=255, label_smoothing=0.1
            )
        if self.kind == "focal":
            return losses.focal(output, classes, weight=(0.1, 0.3, 2.0, 5.0), ignore_index=255)
        if self.kind == "masks":
            mask = classes.where(classes == 255, (classes > 0).long()).unsqueeze(1)
            return losses.binary_dice(output, mask, over="batch", ignore_index=255)
        if self.kind == "both":
            return losses.sum(
                dice=losses.dice(output, classes, over="batch", ignore_index=255),
                entropy=0.5 * losses.cross_entropy(output, classes, ignore_index=255),
            )
        return losses.dice(output, classes, over="batch" if self.kind == "batch" else "sample", ignore_index=255)


@dataclass
class BothByHand(Pixels):
    """Dice and cross-entropy on one device."""

    kind: str = "both"

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Loss:
        classes = batch["classes"]
        one = losses.dice(output, classes, over="batch", ignore_index=255)
        other = nn.functional.cross_entropy(output, classes, ignore_index=255)
        return Loss(one.total / one.count + 0.5 * other, 1)


LAYOUTS = {
    1: ["dp=1", "micro_batch=7"],
    2: ["dp=2", "fsdp=2", "dp=2,micro_batch=5", "fsdp=2,micro_batch=4", "fsdp=2,zero=2", "dp=2,exact=2"],
    4: ["dp=4", "dp=4,micro_batch=2", "dp=2,fsdp=2,micro_batch=3", "fsdp=4"],
}


def run(task: phalanx.Task, layouts: list[str]) -> list[Trace]:
    return [spread_run(task, Layout.parse(layout)) for layout in layouts]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("kind", ["batch", "sample", "masks", "both", "weights", "focal"])
def test_every_layout_trains_like_one_device(ranks: Ranks, kind: str, world: int) -> None:
    task = Pixels(kind=kind)
    layouts = [each for each in LAYOUTS[world] if kind != "both" or "exact" not in each]
    expected = reference(BothByHand() if kind == "both" else task)
    for layout, found in zip(layouts, ranks(world, run, task, layouts)[0], strict=True):
        error, where = difference(found, expected)
        assert error < TOLERANCE, (layout, where)


class Apart(Pixels):
    """Every rank takes the Dice of its own samples."""

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Loss:
        with phalanx.gathering.answered_by(None):
            return super().loss(output, batch)


def test_the_loss_is_another_within_each_ranks_batch(ranks: Ranks) -> None:
    """So that the comparison above can fail."""
    found = ranks(2, run, Apart(), ["dp=2"])[0][0]
    assert difference(found, reference(Pixels()))[0] > 1e-3


def sent(task: phalanx.Task) -> int:
    with phalanx.Engine(task, Layout.parse("dp=2"), device="cpu") as engine:
        batches = engine.batches()
        engine.step(next(batches))
        before = engine.traffic.start_step()
        engine.step(next(batches))
        return sum(engine.traffic.sent_since(before).values())


def test_pixels_stay_where_they_are(ranks: Ranks) -> None:
    """Two numbers a sample and class travel, and their gradients: not 25 pixels, nor more of larger pictures."""
    more = ranks(2, sent, Pixels(kind="batch"))[0] - ranks(2, sent, Pixels(kind="sample"))[0]
    pixels = 16 * 4 * 25 * 8
    assert 0 < more < pixels / 2
