"""Arrays and images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from phalanx import WrongUse
from phalanx.data import Arrays, Images


def test_arrays_of_every_kind(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(12, dtype=np.float32).reshape(6, 2))
    data = Arrays(x=np.load(tmp_path / "x.npy", mmap_mode="r"), y=torch.arange(6), z=[1, 2, 3, 4, 5, 6])
    assert len(data) == 6
    assert data[2]["x"].tolist() == [4, 5]
    batch = data.batch(np.array([5, 0]))
    assert batch["x"].tolist() == [[10, 11], [0, 1]]
    assert batch["y"].tolist() == [5, 0]
    assert batch["z"].tolist() == [6, 1]


def test_arrays_that_do_not_match_are_refused() -> None:
    with pytest.raises(WrongUse, match="differ in length"):
        Arrays(x=np.zeros(3), y=np.zeros(4))
    with pytest.raises(WrongUse, match="no columns"):
        Arrays()
    with pytest.raises(WrongUse, match="give uint8"):
        Images(np.zeros((2, 4, 4, 3)), [0, 1])


def test_images_are_normalised_and_augmented_by_seed() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 6, 3), dtype=np.uint8)
    plain = Images(pixels, [0, 1, 2, 3], mean=0.5, std=0.5)
    assert plain[1]["image"].shape == (3, 6, 6)
    assert plain[1]["label"] == 1
    assert torch.allclose(plain[1]["image"][:, 2, 3] * 0.5 + 0.5, torch.tensor(pixels[1, 2, 3] / 255).float())
    varied = Images(pixels, [0, 1, 2, 3], augment=True)
    draws = []
    for seed in (1, 1, 2):
        np.random.seed(seed)
        draws.append(varied[0]["image"])
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
