"""Mixup and cutmix: keyed by sample and epoch, right shares, and what cannot be mixed refused."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import phalanx
from phalanx import Layout, WrongUse
from phalanx.data import Arrays, CutMix, Mixup
from phalanx.data.loader import Loader
from phalanx.data.order import Order
from phalanx.task import Task
from tests.ranks import Ranks
from tests.tasks import Digits


def images(size: int = 12) -> Arrays:
    pixels = np.random.default_rng(0).normal(size=(size, 3, 5, 7)).astype(np.float32)
    return Arrays(image=pixels, y=np.arange(size) % 4, id=np.arange(size))


def read(data: object, ranks: int, rank: int, step: int) -> dict[str, torch.Tensor]:
    loader = Loader(data, Task().collate, Order(12, 6, seed=3), micro_batches=1, ranks=ranks, rank=rank, plain=True)
    return next(iter(loader.batches(step, step + 1))).micro_batches[0].tensors


@pytest.mark.parametrize("kind", [Mixup, CutMix])
def test_pairs_do_not_depend_on_ranks_and_change_with_the_epoch(kind: type[Mixup]) -> None:
    options = {"image": "image"} if kind is CutMix else {}
    data = kind(images(), alpha=1.0, labels={"y": 4}, keep=["id"], **options)
    alone = read(data, 1, 0, step=1)
    shared = [read(data, 3, rank, step=1) for rank in range(3)]
    for name, whole in alone.items():
        assert torch.equal(torch.cat([part[name] for part in shared]), whole)
    again = [read(data, 1, 0, step) for step in (2, 3)]  # the next epoch
    for name in ("image", "y"):
        rows = {int(i): row for part in again for i, row in zip(part["id"], part[name], strict=True)}
        assert any(not torch.equal(rows[int(i)], row) for i, row in zip(alone["id"], alone[name], strict=True))


def test_a_share_of_each() -> None:
    source = images()
    for index in range(12):
        np.random.seed(index)
        partner, share = np.random.randint(12), np.random.beta(0.7, 0.7)
        np.random.seed(index)
        sample = Mixup(source, alpha=0.7, labels={"y": 4}, keep=["id"])[index]
        own, other = source[index], source[int(partner)]
        assert torch.allclose(sample["image"], share * own["image"] + (1 - share) * other["image"])
        expected = torch.zeros(4)
        expected[int(own["y"])] += share
        expected[int(other["y"])] += 1 - share
        assert torch.allclose(sample["y"], expected)
        assert sample["id"] == index


def test_a_box_of_another_counts_by_its_area() -> None:
    source = images()
    seen = set()
    for index in range(12):
        np.random.seed(index)
        partner = np.random.randint(12)
        np.random.seed(index)
        sample = CutMix(source, image="image", labels={"y": 4}, keep=["id"])[index]
        own, other = source[index], source[int(partner)]
        from_other = (sample["image"] == other["image"]).all(0)
        assert ((sample["image"] == own["image"]).all(0) | from_other).all()
        if own["y"] != other["y"]:
            share = float(from_other.float().mean())
            seen.add(share)
            assert sample["y"][int(other["y"])] == pytest.approx(share)
            assert float(sample["y"].sum()) == pytest.approx(1)
    assert len(seen) > 3
    assert torch.equal(source[0]["image"], images()[0]["image"]), "the data set itself is not changed"


def pictures(kind: type = np.int64) -> Arrays:
    pixels = np.random.default_rng(0).normal(size=(12, 3, 5, 7)).astype(np.float32)
    marks = np.arange(12).reshape(12, 1, 1) * np.ones((12, 5, 7))
    return Arrays(image=pixels, mask=marks.astype(kind), y=np.arange(12) % 4)


@pytest.mark.parametrize("kind", [np.int64, np.float32, np.uint8])
def test_masks_are_pasted_with_their_pictures(kind: type) -> None:
    source, boxes = pictures(kind), 0
    for index in range(12):
        np.random.seed(index)
        partner = int(np.random.randint(12))
        np.random.seed(index)
        sample = CutMix(source, image="image", masks=["mask"], labels={"y": 4})[index]
        assert sample["mask"].dtype == source[index]["mask"].dtype
        from_other = (sample["image"] == source[partner]["image"]).all(0)
        wanted = torch.where(from_other, source[partner]["mask"], source[index]["mask"])
        assert torch.equal(sample["mask"], wanted), "a pixel has the mask of another picture"
        boxes += bool(from_other.any()) and partner != index
    assert boxes > 3
    assert torch.equal(source[0]["mask"], pictures(kind)[0]["mask"])


def test_a_mask_that_is_not_named_is_refused_with_what_works() -> None:
    for kind in (np.int64, np.float32):
        for wrong in ({"keep": ["y"]}, {"labels": {"y": 4}}):
            with pytest.raises(WrongUse, match=r"masks=\['mask'\]"):
                CutMix(pictures(kind), image="image", **wrong)[0]
        with pytest.raises(WrongUse, match=r"labels names 'mask', which is no class but .*masks=\['mask'\]"):
            CutMix(pictures(kind), image="image", labels={"mask": 4, "y": 4})[0]
        CutMix(pictures(kind), image="image", keep=["mask", "y"])[0]
    with pytest.raises(WrongUse, match=r"Mixup cannot mix 'mask', which is torch.int64. .*masks=\['mask'\]"):
        Mixup(pictures(), labels={"y": 4})[0]
    with pytest.raises(WrongUse, match="told of a mask 'marks'; did you mean 'mask'"):
        CutMix(pictures(), image="image", masks=["marks"], labels={"y": 4})[0]
    with pytest.raises(WrongUse, match="cannot cut 'y' of shapes"):
        CutMix(pictures(), image="image", masks=["y"])[0]


def test_what_cannot_be_mixed_is_refused() -> None:
    with pytest.raises(WrongUse, match=r"labels=\{'y': 10\}"):
        Mixup(images())[0]
    with pytest.raises(WrongUse, match="none of the 2 classes"):
        [Mixup(images(), labels={"y": 2}, keep=["id"])[i] for i in range(4)]
    with pytest.raises(WrongUse, match="no shares"):
        Mixup(images(), alpha=0)
    with pytest.raises(WrongUse, match="told of 'label'"):
        Mixup(images(), labels={"label": 4})[0]
    with pytest.raises(WrongUse, match="an image 'picture'"):
        CutMix(images(), image="picture", labels={"y": 4}, keep=["id"])[0]

    class Ragged:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"x": torch.zeros(index + 1)}

    with pytest.raises(WrongUse, match="of shapes"):
        [Mixup(Ragged())[i % 2] for i in range(20)]


@dataclass
class Mixed(Digits):
    precision: str = "float64"

    def data(self):
        return Mixup(super().data(), alpha=0.4, labels={"y": 3})


def weights(task: phalanx.Task, layout: str) -> dict[str, torch.Tensor]:
    with phalanx.Engine(task, Layout.parse(layout), device="cpu") as engine:
        for batch in engine.batches():
            engine.step(batch)
        return {name: tensor.clone() for name, tensor in engine.whole_weights().items()}


def test_a_mixed_task_trains_alike_at_any_number_of_ranks(ranks: Ranks) -> None:
    task = Mixed()
    expected = weights(task, "dp=1")
    for found in ranks(2, weights, task, "fsdp=2"):
        for name, want in expected.items():
            assert torch.allclose(found[name], want, rtol=1e-9, atol=1e-12)
    plain = weights(Digits(precision="float64"), "dp=1")
    assert any(not torch.allclose(plain[name], want) for name, want in expected.items()), "it mixes"
