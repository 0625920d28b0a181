"""Where parts of a batch need not add up to the whole: the task has asked for all samples, or gives losses by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx
from phalanx.train.check.beside import checked
from tests.mistakes import Points


@dataclass
class Gathered(Points):
    """A contrastive loss as it should be; ``several`` losses, each with a count of its own."""

    several: bool = False

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        if self.several:
            one = phalanx.Loss(output.square().sum(), 2 * len(output))
            return phalanx.losses.sum(one=one, other=phalanx.losses.cross_entropy(output, batch["y"]))
        every = phalanx.gather(F.normalize(output, dim=1))
        rows = phalanx.rows(output)
        return phalanx.Loss(F.cross_entropy(every[rows] @ every.T, rows, reduction="sum"), len(rows))


@pytest.mark.parametrize("several", [False, True])
def test_a_loss_that_asks_for_all_samples_is_no_sum(several: bool) -> None:
    found = checked(Gathered(several=several))
    assert (found.refusal, found.warnings, found.left_out) == ("", [], "")


@dataclass
class Parts(Points):
    """What only looks like a mean: totals that are all negative, samples that weigh nothing."""

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        weights = (batch["y"] > 0).to(output)
        return phalanx.Loss((output.log_softmax(1)[:, 0] * weights).sum(), weights.sum())


def test_weighted_sums_are_sums() -> None:
    assert checked(Parts()).refusal == ""


@dataclass
class Changing(Points):
    """Losses whose names depend on how many samples are together, in the loss and in the evaluation."""

    changes: bool = True

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        name = "many" if self.changes and len(output) > 5 else "other"
        one = phalanx.Loss(output.square().sum(), 2 * len(output))
        return phalanx.losses.sum(one=one, **{name: phalanx.losses.cross_entropy(output, batch["y"])})

    def evaluate(self, output: Tensor, batch: dict[str, Any]) -> dict[str, phalanx.Loss]:
        return {"loss": self.loss(output, batch)}


def test_a_sum_has_the_same_names_whatever_is_together() -> None:
    assert checked(Changing(changes=False)).refusal == ""
    assert "gets one, many for a batch and one, other for some of it. Give it every name" in checked(Changing()).refusal


@dataclass
class Boxes(Points):
    """A detector's batches: pictures of one shape in a list, boxes of each in another, and as rows with places."""

    alike: bool = True

    def data(self) -> Any:
        source = torch.Generator().manual_seed(0)
        found = []
        for number in range(40):
            boxes = torch.rand(2 if self.alike else number % 4, 4, generator=source)
            found.append({"x": torch.randn(4, generator=source), "boxes": boxes, "kinds": torch.arange(len(boxes)) % 3})
        return found

    def collate(self, samples: Any) -> dict[str, Any]:
        places = torch.cat([torch.full((len(s["boxes"]),), i) for i, s in enumerate(samples)])
        return {
            "x": [s["x"] for s in samples],
            "boxes": [s["boxes"] for s in samples],
            "goals": [{"kinds": s["kinds"], "named": [str(len(s["kinds"])), s["boxes"]]} for s in samples],
            "rows": torch.cat([s["boxes"] for s in samples]),
            "places": places,
            "edges": torch.stack([places, places]),
        }

    def inputs(self, batch: dict[str, Any]) -> Any:
        return torch.stack(batch["x"])

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        wanted = torch.stack([boxes.sum() for boxes in batch["boxes"]])
        found = output.new_zeros(len(output)).index_add(0, batch["places"], batch["rows"].sum(1).to(output))
        assert type(self) is Shifts or torch.allclose(found, wanted.to(output))
        return phalanx.Loss((output[:, 0] - wanted).square().sum(), len(output))


@dataclass
class Shifts(Boxes):
    """What mixes is found in lists as well: boxes moved by the middle of the batch's."""

    def collate(self, samples: Any) -> dict[str, Any]:
        batch = super().collate(samples)
        middle = batch["rows"].mean(0)
        return batch | {"boxes": [boxes - middle for boxes in batch["boxes"]]}


@pytest.mark.parametrize("alike", [True, False])
def test_lists_of_tensors_are_compared_sample_by_sample(alike: bool) -> None:
    found = checked(Boxes(alike=alike))
    assert (found.refusal, found.warnings, found.left_out) == ("", [], "")
    assert "Shifts.collate mixes samples" in checked(Shifts(alike=alike)).refusal


@dataclass
class Overlapping(Points):
    """Soft Dice losses, as people write them; ``how``: over what, and what is returned."""

    how: str = "batch"

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        found, wanted = output.softmax(1), F.one_hot(batch["y"], 3).to(output)
        if self.how == "library":
            return phalanx.losses.dice(output.unsqueeze(2), batch["y"].unsqueeze(1), over="batch")
        dims = (1,) if self.how == "sample" else (0,)
        both = found.sum(dims) + wanted.sum(dims)
        dice = (2 * (found * wanted).sum(dims) + 1) / (both + 1)
        if self.how == "sample":
            return phalanx.Loss((1 - dice).sum(), len(output))
        loss = 1 - dice.mean()
        return phalanx.Loss(loss, 1) if self.how == "one" else phalanx.Loss(loss * len(output), len(output))


@pytest.mark.parametrize("how", ["batch", "one"])
def test_soft_dice_over_the_batch_is_told_apart(how: str) -> None:
    said = checked(Overlapping(how=how)).refusal
    assert "divides by a sum over the batch of what the model predicts" in said
    assert "test_sums.py" in said
    assert "dice = (2 * (found * wanted).sum(dims) + 1) / (both + 1)" in said
    assert 'phalanx.losses.dice(output, targets, over="batch")' in said


@pytest.mark.parametrize("how", ["sample", "library"])
def test_soft_dice_of_each_sample_and_ours_are_right(how: str) -> None:
    found = checked(Overlapping(how=how))
    assert (found.refusal, found.warnings, found.left_out) == ("", [], "")


class Averaging(nn.Module):
    """Takes the mean over time, of what pads a batch too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.inner(x)).mean(1)


@dataclass
class PaddedHeldOut(Points):
    """Samples of one length to train on, and of unequal ones to evaluate on. ``what``: where that matters."""

    what: str = "loss"

    def model(self) -> nn.Module:
        return Averaging() if self.what in ("loss", "rows") else nn.Linear(4, 3)

    def samples(self, lengths: list[int]) -> Any:
        source = torch.Generator().manual_seed(0)
        return [{"x": torch.randn(n, 4, generator=source), "y": i % 3} for i, n in enumerate(lengths)]

    def data(self) -> Any:
        return self.samples([6] * 40)

    def held_out(self) -> Any:
        return self.samples([6, 3, 5, 4, 9, 7, 3, 8])

    def collate(self, samples: Any) -> dict[str, Any]:
        x = nn.utils.rnn.pad_sequence([s["x"] for s in samples], batch_first=True)
        return {"x": x, "y": torch.tensor([s["y"] for s in samples])}

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        if self.what == "total":
            return phalanx.Loss(torch.sigmoid(output).sum(), len(output))
        return phalanx.losses.cross_entropy(output if self.what in ("loss", "rows") else output[:, 0], batch["y"])

    def evaluate(self, output: Tensor, batch: dict[str, Any]) -> Any:
        if self.what == "rows":
            return {"right": phalanx.Loss(output.new_ones(()) * len(output), len(output)), "score": output[:, 0]}
        if self.what == "own rows":
            return {"score": torch.sigmoid(output).mean((1, 2))}
        return super().evaluate(output, batch)

    def summarise(self, gathered: dict[str, Any]) -> dict[str, float]:
        return {"score": float(gathered["score"].mean())}


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("loss", "the model of PaddedHeldOut mixes held-out samples"),
        ("rows", "the model of PaddedHeldOut mixes held-out samples"),
        ("total", "PaddedHeldOut.evaluate's 'loss' depends on which samples are computed together"),
        ("own rows", "PaddedHeldOut.evaluate's 'score' gives a sample something else when others are in its batch"),
    ],
)
def test_held_out_samples_are_tried_too(what: str, told: str) -> None:
    """Also by the default evaluation, which is the loss; what is padded is named with its sizes."""
    said = checked(PaddedHeldOut(what=what)).refusal
    assert told in said.replace(" total of", "")
    assert "collate pads 'x' to the longest of a batch, [7, 9, 4] for all samples and [3, 4, 4] for some" in said


def test_held_out_samples_that_are_padded_and_masked_are_right() -> None:
    assert checked(PaddedHeldOut(what="first alone")).refusal == ""
