"""Data sets that are arrays, in memory or memory-mapped (``np.load(path, mmap_mode="r")``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.data.columns import no_column
from phalanx.errors import WrongUse


def _check_lengths(columns: dict[str, Any]) -> int:
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) != 1:
        raise WrongUse(f"the arrays differ in length: {lengths}. Give arrays with one row a sample.")
    return next(iter(lengths.values()))


class Arrays:
    """Columns of equal length: ``Arrays(x=features, y=labels)``; sample i is row i of each."""

    def __init__(self, **columns: Any) -> None:
        if not columns:
            raise WrongUse("Arrays() has no columns. Name at least one, e.g. Arrays(x=features, y=labels).")
        self.columns = {n: c if isinstance(c, Tensor) else np.asanyarray(c) for n, c in columns.items()}
        self._length = _check_lengths(self.columns)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.batch(index)

    def batch(self, ids: np.ndarray | int) -> dict[str, Tensor]:
        """Many rows in one indexing operation a column."""
        return {
            name: column[ids] if isinstance(column, Tensor) else torch.from_numpy(np.array(column[ids]))
            for name, column in self.columns.items()
        }

    def column(self, name: str) -> Any:
        """A column of all samples."""
        if name not in self.columns:
            raise no_column(name, self.columns)
        return self.columns[name]


class Images:
    """Images as one uint8 array ``[sample, height, width, channel]``, given as normalised ``image`` and ``label``.

    With ``augment``, each visit of a sample is flipped and shifted at random, by the loader's seed for that visit.
    """

    def __init__(
        self,
        images: np.ndarray,
        labels: Sequence[int] | np.ndarray,
        *,
        augment: bool = False,
        mean: float | Sequence[float] = 0.5,
        std: float | Sequence[float] = 0.25,
        shift: int = 2,
    ) -> None:
        if images.ndim != 4 or images.dtype != np.uint8:
            raise WrongUse(
                f"images are {images.dtype} of shape {images.shape}; give uint8 [sample, height, width, channel]."
            )
        self.images, self.labels, self.augment, self.shift = images, np.asarray(labels), augment, shift
        self.mean, self.std = torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1)
        self._length = _check_lengths({"images": images, "labels": labels})

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = np.array(self.images[index])
        if self.augment:
            image = self._augmented(image)
        pixels = torch.from_numpy(image).permute(2, 0, 1).float().div_(255)
        return {"image": pixels.sub_(self.mean).div_(self.std), "label": int(self.labels[index])}

    def column(self, name: str) -> np.ndarray:
        """The labels of all images."""
        if name != "label":
            raise no_column(name, ["label"])
        return self.labels

    def _augmented(self, image: np.ndarray) -> np.ndarray:
        if np.random.rand() < 0.5:
            image = image[:, ::-1]
        down, right = np.random.randint(-self.shift, self.shift + 1, size=2)
        height, width = image.shape[:2]
        padded = np.pad(image, [(self.shift, self.shift), (self.shift, self.shift), (0, 0)])
        top, left = self.shift + down, self.shift + right
        return np.ascontiguousarray(padded[top : top + height, left : left + width])
