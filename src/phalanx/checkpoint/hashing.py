"""Hashes of tensors that do not depend on how they were cut.

A tensor is seen as a matrix. Each element is multiplied by a key of its row and a key of its column, and all of it is
added up modulo 2 ** 64, so that any division into parts gives the same sum: a checkpoint saved under one layout and
again under another has the same hashes. Keys are odd, so that no change of one element goes unseen, and look random, so
that neither do changes of several, or elements that changed places.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from phalanx.parallel.weights.boxes import Box

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
FACTORS = (0x9E3779B97F4A7C15 - (1 << 64), 0x2545F4914F6CDD1D, 0x369DEA0F31A53F85)
LENGTH = 1 << 16
"""Longer rows are hashed in parts, whose keys stay in the cache."""


def hashed(part: Tensor, box: Box, shape: Iterable[int]) -> int:
    """The sum for a part of a tensor of ``shape``; sums of parts add up, modulo 2 ** 64."""
    if not part.numel():
        return 0
    words, offsets, sizes, whole = _words(part.detach(), box, tuple(shape))
    # the dims before it are rows: where there are fewest keys
    split = min(range(len(whole)), key=lambda dim: math.prod(whole[:dim]) + math.prod(whole[dim:]))
    rows = _mixed(_places(offsets[:split], sizes[:split], whole[:split], part.device), FACTORS[0])
    columns = _places(offsets[split:], sizes[split:], whole[split:], part.device)
    total = torch.zeros_like(rows)
    for matrix, some in zip(words.reshape(len(rows), -1).split(LENGTH, 1), columns.split(LENGTH), strict=True):
        total += _product(matrix, _mixed(some, FACTORS[1]))
    return int((total * rows).sum()) % (1 << 64)


def _product(matrix: Tensor, keys: Tensor) -> Tensor:
    """Each row times the keys, summed; on a CPU by numpy, as torch's product of integers takes three times as long."""
    if matrix.device.type == "cpu":
        return torch.from_numpy(np.einsum("rc,c->r", matrix.numpy(), keys.numpy(), dtype=np.int64))
    return torch.cat([(rows.long() * keys).sum(1) for rows in matrix.split(max(1, (1 << 24) // len(keys)))])


def _words(part: Tensor, box: Box, shape: tuple[int, ...]) -> tuple[Tensor, list[int], list[int], list[int]]:
    """A part as integers, its offsets, its sizes, the shape of the whole; a number of 8 bytes is two of 4.

    Differences of such are small against 2 ** 64: times a difference of keys, which is even, they do not vanish.
    """
    offsets, sizes, whole = list(box.offsets) or [0], list(box.sizes) or [1], list(shape) or [1]
    words = part.contiguous().reshape(sizes)
    size = words.element_size()
    if size == 8:
        for numbers in (offsets, sizes, whole):
            numbers[-1] *= 2
    return words.view(WORDS[min(size, 4)]), offsets, sizes, whole


def _places(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int], device: torch.device) -> Tensor:
    """Where each element of a box lies in a whole of ``shape``, one after another."""
    places, stride = torch.zeros(1, dtype=torch.int64, device=device), 1
    for offset, size, whole in reversed(list(zip(offsets, sizes, shape, strict=True))):
        along = torch.arange(offset, offset + size, device=device).mul_(stride)
        places, stride = (along.unsqueeze(1) + places).reshape(-1), stride * whole
    return places


def _mixed(places: Tensor, factor: int) -> Tensor:
    """An odd number for each place that looks random."""
    keys = (places + 1).mul_(factor)
    keys.bitwise_xor_(keys >> 31).mul_(FACTORS[2])
    return keys.bitwise_xor_(keys >> 29).bitwise_or_(1)


def joined(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> str:
    """One hash of many tensors, each given by name, dtype, shape and sum."""
    found = hashlib.sha256()
    for name, dtype, shape, value in sorted(tensors):
        found.update(f"{name} {dtype} {list(shape)} {value:016x}\n".encode())
    return found.hexdigest()
