"""Whether held-out samples are trained on, too: by hashes of all rows of arrays, or of some samples of other data."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Subset

from phalanx import counter
from phalanx.data.arrays import Arrays, Images
from phalanx.data.fingerprint import near
from phalanx.data.splitting import Split
from phalanx.errors import WrongUse
from phalanx.task import Task
from phalanx.train.check import lines
from phalanx.train.check.samples import fingerprint, read_sample

HELD_OUT, TRAINED = 512, 4096
"""So many samples are read at most where each is read by itself,"""
SECONDS = 0.15
"""and for so long at most."""
MOST_ROWS, MOST_BYTES = 1 << 17, 1 << 25
"""Of arrays that are hashed whole."""
CERTAIN, NOTED = 0.05, 0.01
"""Of held-out samples, how many must be trained on, too, for a refusal, and for a warning."""
FEWEST = 3
Hashes = list[tuple[int, Any]]
"""Numbers of samples, and what they hash to."""


def check_leak(task: Task, data: Any, held_out: Any) -> list[str]:
    """Refuse held-out samples of which many are trained on; returns a warning of some."""
    if held_out is None or not len(held_out):
        return []
    trained, kept = _both(task, data, held_out)
    first = {hash: index for index, hash in reversed(trained)}
    both = [(index, first[hash]) for index, hash in kept if hash in first]
    if len(both) < min(FEWEST, len(kept)):
        return []
    common = _common(trained, kept)  # what is there often is found by looking at few: these are not more in all of it
    share = min(1.0, len(both) / len(kept) * (1 if common else len(data) / len(trained)))
    if share < NOTED:
        return []
    name = type(task).__name__
    found = f"sample {both[0][0]} of {name}.held_out is sample {both[0][1]} of {name}.data"
    where = lines.at(lines.first_of(type(task).held_out, type(task).data))
    about = f"about {share:.0%} of the held-out samples are also trained on"
    if share < CERTAIN or common:
        return [f"{about}: {found}, for one{where}. Is the same twice in the data, or is its division wrong?"]
    raise WrongUse(
        f"{about}: {found}, for one{where}. What is measured there would be too good. A division that draws anew in "
        "each of the two methods gives two that overlap: use phalanx.data.split(samples, held_out=0.1, seed=0), a pure "
        "function, and return its [0] in data() and its [1] in held_out()."
    )


def _common(trained: Hashes, kept: Hashes) -> bool:
    """Whether two training samples are the same about as often as one of them and a held-out one."""
    one, other = Counter(hash for _, hash in trained), Counter(hash for _, hash in kept)
    between = sum(count * one[hash] for hash, count in other.items()) / (len(trained) * len(kept))
    within = sum(count * (count - 1) for count in one.values()) / (len(trained) * max(1, len(trained) - 1))
    return within > between / 4


def _both(task: Task, data: Any, held_out: Any) -> tuple[Hashes, Hashes]:
    """Of both data sets alike: of all rows, where both are arrays of which that is not too much; else of some."""
    trained = _rows(data)
    kept = None if trained is None else _rows(held_out)
    if trained is not None and kept is not None:
        return list(enumerate(trained)), list(enumerate(kept))
    return _hashed(task, data, TRAINED, "data"), _hashed(task, held_out, HELD_OUT, "held_out")


def _hashed(task: Task, data: Any, most: int, method: str) -> Hashes:
    """Numbers and hashes of some samples."""
    found, deadline = [], time.perf_counter() + SECONDS
    for number, index in enumerate(near(data, _spread(len(data), most))):
        if time.perf_counter() > deadline and number >= FEWEST:
            break
        found.append((index, fingerprint(read_sample(task, data, index, method))))
    return found


def _spread(size: int, most: int) -> Iterator[int]:
    """Numbers of samples, each as far from those before as can be: wherever it ends, they are spread evenly."""
    count = min(size, most)
    bits = max(1, (count - 1).bit_length())
    for number in range(1 << bits):
        place = int(f"{number:0{bits}b}"[::-1], 2)
        if place < count:
            yield place * size // count


def _rows(data: Any) -> list[int] | None:
    """A hash of each row of arrays, or None for what has none."""
    if isinstance(data, Split):
        whole = _rows(data.data)
        return None if whole is None else [whole[i] for i in data.ids(np.arange(len(data)))]
    if isinstance(data, Subset):
        whole = _rows(data.dataset)
        return None if whole is None else [whole[i] for i in data.indices]
    if isinstance(data, Images):
        columns: list[Any] = [data.images, data.labels]
    elif type(data) is Arrays:
        columns = list(data.columns.values())
    else:
        return None
    if sum(column.nbytes for column in columns) > MOST_BYTES or len(data) > MOST_ROWS:
        return None
    found = np.zeros(len(data), dtype=np.uint64)
    for number, column in enumerate(columns):
        found = counter.mix_array(found + np.uint64(number)) + _row_hashes(column)
    return found.tolist()


def _row_hashes(column: Any) -> np.ndarray:
    """One 64-bit number a row, from all its bytes."""
    array = column.detach().cpu().numpy() if isinstance(column, Tensor) else np.asarray(column)
    if array.dtype.hasobject:
        return np.array([int(fingerprint(str(row)), 16) & 0xFFFFFFFFFFFFFFFF for row in array], dtype=np.uint64)
    rows = np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)
    words = np.pad(rows, [(0, 0), (0, -rows.shape[1] % 8)]).view(np.uint64)
    return counter.mix_array(words + counter.mix_array(np.arange(words.shape[1], dtype=np.uint64))).sum(
        1, dtype=np.uint64
    )
