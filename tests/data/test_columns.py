"""Columns of whole data sets, through what stands around them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from phalanx import WrongUse, data
from phalanx.data.adopted import adopted
from phalanx.data.columns import column_of
from tests.tasks import Digits

LABELS = [i % 3 for i in range(12)]
POINTS = data.Arrays(x=np.zeros((12, 2)), y=np.array(LABELS))


class Folder:
    """As torchvision's: tuples, and ``targets``."""

    targets = LABELS

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Any, int]:
        raise AssertionError("a sample was read")


KINDS = {
    "arrays": POINTS,
    "list": [{"x": 0.0, "y": label} for label in LABELS],
    "tensors": [{"y": torch.tensor(label)} for label in LABELS],
    "named": data.Named([(0.0, label) for label in LABELS], "x", "y"),
    "folder": data.Named(Folder(), "x", "y"),
    "part of a folder": data.Named(Subset(Folder(), range(12)), "x", "y"),  # type: ignore[type-var]
    "tensor data set": data.Named(TensorDataset(torch.zeros(12, 2), torch.tensor(LABELS)), "x", "y"),
    "subset": Subset(POINTS, range(12)),
    "mixed": data.Mixup(POINTS, labels={"y": 3}),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_column_is_found_without_reading_samples(name: str) -> None:
    assert np.asarray(column_of(KINDS[name], "y")).tolist() == LABELS


def test_of_parts_it_is_theirs() -> None:
    part = data.split(POINTS, held_out=4)[0]
    assert column_of(part, "y").tolist() == [int(part[i]["y"]) for i in range(len(part))]
    assert column_of(Subset(POINTS, [3, 1]), "y").tolist() == [LABELS[3], LABELS[1]]
    images = data.Images(np.zeros((12, 2, 2, 3), dtype=np.uint8), LABELS)
    assert column_of(images, "label").tolist() == LABELS


def test_of_what_a_loader_reads() -> None:
    loaded = adopted(DataLoader(KINDS["list"], batch_size=8, shuffle=True), Digits(), "data")  # type: ignore[arg-type]
    assert column_of(loaded, "y").tolist() == LABELS


def test_what_is_not_there_is_refused() -> None:
    for kind in ("arrays", "list", "named", "mixed"):
        with pytest.raises(WrongUse, match="no column 'label'"):
            column_of(KINDS[kind], "label")
    with pytest.raises(WrongUse, match=r"Give its class a method column\(self, name\)"):
        column_of(Folder(), "y")


def test_hugging_faces_give_theirs() -> None:
    datasets = pytest.importorskip("datasets")
    assert column_of(datasets.Dataset.from_dict({"y": LABELS}), "y").tolist() == LABELS
