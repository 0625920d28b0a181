"""A counter-based generator: random bits as a pure function of a key and an index.

Initial weights, dropout masks and data order all come from here, so none of them depends on which rank
draws, in what order, or on what device. The mixer is splitmix64's; two runs agree bit for bit on CPU and GPU.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

CHUNK = {"cpu": 1 << 16}
"""Elements filled at a time: few enough to stay in a processor's cache,"""
LARGE_CHUNK = 1 << 24
"""and enough to fill any other device, whose launches cost more."""


def _signed(value: int) -> int:
    """The int64 with the same 64 bits, because torch has no full uint64 arithmetic."""
    return value - (1 << 64) if value >= 1 << 63 else value


GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
STRIDE = _signed(GAMMA)
"""Multiplied by an index and added to a key, it gives the key of that index's own stream."""
CALL = 0xD1B54A32D192ED03
OFFSETS = tuple(_signed(number * CALL % (1 << 64)) for number in range(256))


Place = tuple[Sequence[int], Sequence[int]]
"""Where a box begins in a whole tensor, and that one's sizes. Elements are numbered as in the whole."""


def key(*parts: int | str) -> int:
    """A 64-bit key for a stream of numbers, e.g. ``key(seed, "init", "blocks.0.weight")``."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return _signed(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))


def call_offset(number: int) -> int:
    """What to add to a key for the n-th call under it.

    By a table: a compiled program then has this very number, not an expression of more than 64 bits.
    """
    return OFFSETS[number] if number < len(OFFSETS) else _signed(number * CALL % (1 << 64))


def nth(stream: int, number: int) -> int:
    """The key of the n-th stream under a key."""
    x = (stream + number * CALL) % (1 << 64)
    x = (x ^ (x >> 30)) * FIRST % (1 << 64)
    x = (x ^ (x >> 27)) * SECOND % (1 << 64)
    return _signed(x ^ (x >> 31))


AXES = tuple(key("axis", axis) | 1 for axis in range(16))


def mix(x: Tensor) -> Tensor:
    """Scramble an int64 tensor in place: a bijection in which every output bit depends on every input bit."""
    x.bitwise_xor_((x >> 30) & ((1 << 34) - 1)).mul_(_signed(FIRST))
    x.bitwise_xor_((x >> 27) & ((1 << 37) - 1)).mul_(_signed(SECOND))
    return x.bitwise_xor_((x >> 31) & ((1 << 33) - 1))


def mix_array(x: np.ndarray) -> np.ndarray:
    """The same scramble for a numpy uint64 array."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(FIRST)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(SECOND)
        return x ^ (x >> np.uint64(31))


def bits(stream: int, index: Tensor) -> Tensor:
    """64 random bits for each index of a stream, in place."""
    return mix(index.add_(1).mul_(STRIDE).add_(stream))


def box_words(stream: int, sizes: Sequence[int], place: Place, device: torch.device) -> Tensor:
    """32 random bits for each element of a box: 64 for every two neighbours in the whole, however it is cut."""
    offsets, whole = place
    starts, length = _runs(sizes, place, device)
    odd = sum(offset * math.prod(whole[axis + 1 :]) for axis, offset in enumerate(offsets)) % 2
    apart = math.prod(whole[_first_of_run(sizes, whole) :])
    if len(starts) == 1 or apart % 2 == 0:  # all runs begin in the same half
        pairs = torch.arange((odd + length + 1) // 2, dtype=torch.int64, device=device)
        raw = bits(stream, (starts >> 1)[:, None] + pairs)
        return raw.view(torch.int32)[:, odd : odd + length].reshape(tuple(sizes))
    index = starts[:, None] + torch.arange(length, dtype=torch.int64, device=device)
    raw = bits(stream, index >> 1)
    return (raw >> (index & 1).mul_(32)).int().view(tuple(sizes))


def grid_bits(keys: Tensor, grid: Sequence[int | Tensor]) -> Tensor:
    """64 random bits for each place in a grid under each key: ``keys.shape + grid``.

    A dim of the grid is a size, or the coordinates wanted of it. A place's bits depend on its coordinates, not on the
    grid's size, so padding a batch longer changes nothing.
    """
    index = torch.full((), STRIDE, dtype=torch.int64, device=keys.device)
    for axis, size in enumerate(grid):
        places = size if isinstance(size, Tensor) else torch.arange(size, dtype=torch.int64, device=keys.device)
        # the xor keeps torch.compile from folding this into an index of 32 bits, which overflows
        index = index.unsqueeze(-1) + (places ^ 1) * AXES[axis]
    return mix(keys.view((*keys.shape, *[1] * len(grid))) + index)


def uniform(raw: Tensor) -> Tensor:
    """Uniform in [0, 1) with all 53 bits of a float64."""
    return ((raw >> 11) & ((1 << 53) - 1)).double().mul_(2.0**-53)


def normal(raw: Tensor) -> Tensor:
    """Standard normal by Box-Muller, each value from the two halves of its own 64 bits."""
    high = ((raw >> 32) & 0xFFFFFFFF).double().add_(0.5).mul_(2.0**-32)
    low = (raw & 0xFFFFFFFF).double().mul_(2.0**-32)
    return high.log_().mul_(-2.0).sqrt_().mul_(low.mul_(2 * math.pi).cos_())


def keep_mask(keys: Tensor, grid: Sequence[int | Tensor], drop: float) -> Tensor:
    """A boolean mask ``keys.shape + grid``, False with probability ``drop``; each 64 bits decide two neighbours."""
    *outer, last = grid or (1,)
    threshold = min(round(drop * 2**32), 2**32 - 1) - 2**31
    if isinstance(last, Tensor):
        lanes = grid_bits(keys, [*outer, last // 2]).unsqueeze(-1).view(torch.int32)
        chosen = (last % 2).view(-1, 1).expand(*lanes.shape[:-1], 1)
        return lanes.gather(-1, chosen).squeeze(-1) >= threshold
    mask = grid_bits(keys, [*outer, (last + 1) // 2]).view(torch.int32)[..., :last] >= threshold
    return mask if grid else mask.squeeze(-1)


def fill_uniform(target: Tensor, stream: int, low: float, high: float, place: Place | None = None) -> Tensor:
    """Fill ``target`` with uniforms in [low, high); an element depends on the stream and its place alone."""
    flat = _flat(target)
    for part, raw in _drawn(flat, target.shape, stream, place):
        part.copy_(uniform(raw).mul_(high - low).add_(low))
    return _unflat(target, flat)


def fill_normal(target: Tensor, stream: int, mean: float, std: float, place: Place | None = None) -> Tensor:
    """Fill ``target`` with normals; an element depends on the stream and its place alone."""
    flat = _flat(target)
    for part, raw in _drawn(flat, target.shape, stream, place):
        part.copy_(normal(raw).mul_(std).add_(mean))
    return _unflat(target, flat)


def _drawn(flat: Tensor, sizes: Sequence[int], stream: int, place: Place | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of a flat target, each with 64 random bits an element."""
    if not flat.numel():
        return
    starts, length = _runs(sizes, place or ((0,) * len(sizes), sizes), flat.device)
    rows, chunk = flat.view(len(starts), length), CHUNK.get(flat.device.type, LARGE_CHUNK)
    together = max(1, chunk // length)
    for row in range(0, len(starts), together):
        for start in range(0, length, chunk):
            part = rows[row : row + together, start : start + chunk]
            along = torch.arange(start, start + part.shape[1], dtype=torch.int64, device=flat.device)
            yield part, bits(stream, starts[row : row + together, None] + along)


def _runs(sizes: Sequence[int], place: Place, device: torch.device) -> tuple[Tensor, int]:
    """Where in the whole each run of a box's neighbouring elements begins, and how long they all are."""
    offsets, whole = place
    dim = _first_of_run(sizes, whole)
    starts = torch.zeros(1, dtype=torch.int64, device=device)
    for axis, offset in enumerate(offsets):
        stride = math.prod(whole[axis + 1 :])
        steps = torch.arange(offset, offset + (sizes[axis] if axis < dim else 1), dtype=torch.int64, device=device)
        starts = (starts[:, None] + steps * stride).view(-1)
    return starts, math.prod(sizes[dim:])


def _first_of_run(sizes: Sequence[int], whole: Sequence[int]) -> int:
    """The first dim along which neighbours in a box are neighbours in the whole: those after it are whole."""
    return max((dim for dim, size in enumerate(sizes) if size != whole[dim]), default=0)


def _flat(target: Tensor) -> Tensor:
    return target.view(-1) if target.is_contiguous() else target.new_empty(target.numel())


def _unflat(target: Tensor, flat: Tensor) -> Tensor:
    return target if target.is_contiguous() else target.copy_(flat.view(target.shape))
