"""A data set divided in two that have no sample in common: one to train on, one to evaluate on.

Which sample goes where is a pure function of the seed and the number of samples, so `Task.data` and `Task.held_out` may
each call it, on any rank, and mean the same division. Nothing is copied.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from phalanx import counter
from phalanx.data.arrays import Arrays
from phalanx.data.columns import column_of
from phalanx.data.order import permute
from phalanx.data.text import Parquet
from phalanx.errors import WrongUse


class Split:
    """Some of a data set's samples: those that a keyed permutation puts into places ``start`` to ``stop``."""

    def __init__(self, data: Any, start: int, stop: int, seed: int) -> None:
        self.data, self.start, self.stop, self.seed = data, start, stop, seed
        self.size = len(data)

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.data[int(self.ids(np.array([index % len(self)]))[0])]

    def ids(self, index: np.ndarray) -> np.ndarray:
        """Where samples of this part are in the whole."""
        return permute(index + self.start, self.size, counter.key(self.seed, "split"))

    def batch(self, ids: np.ndarray) -> dict[str, Any]:
        """Many samples at once, of arrays."""
        return self.data.batch(self.ids(np.asarray(ids)))

    def column(self, name: str) -> Any:
        """A column of all samples of this part."""
        return np.asarray(column_of(self.data, name))[self.ids(np.arange(len(self)))]


def by_rows(data: Any) -> bool:
    """Whether data gives many samples at once: arrays, and parts of them."""
    if isinstance(data, Split):
        return by_rows(data.data)
    return isinstance(data, Arrays) or (isinstance(data, Parquet) and data.by_rows)


def split(data: Any, held_out: float | int = 0.1, seed: int = 0) -> tuple[Split, Split]:
    """The samples to train on and those to evaluate on: a fraction of all, or so many if it is a whole number.

    The same data and seed always give the same division, so call it in both methods of a task:
    ``data()`` returns ``split(samples)[0]``, ``held_out()`` returns ``split(samples)[1]``.
    """
    size = len(data)
    count = held_out if isinstance(held_out, int) else round(size * held_out)
    if isinstance(held_out, bool) or not 0 < count < size:
        raise WrongUse(
            f"split(held_out={held_out}) of {size:,} samples leaves one part empty. Give a fraction between 0 and 1, "
            f"such as 0.1, or a number of samples from 1 to {size - 1:,}."
        )
    return Split(data, 0, size - count, seed), Split(data, size - count, size, seed)
