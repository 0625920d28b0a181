"""What shape an error has: a constant ratio, a sum with parts missing, rows in another order, a lower precision."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import torch
from torch import Tensor

EXACT = 1e-9
"""Within this, what follows from a hypothesis is what was found."""


def same(found: Tensor, expected: Tensor) -> bool:
    """Whether a hypothesis explains what was found."""
    if found.shape != expected.shape:
        return False
    size = float(expected.norm())
    return bool(torch.isfinite(found).all()) and float((found - expected).norm()) <= EXACT * (size or 1.0)


def ratio(found: Tensor, expected: Tensor) -> float | None:
    """``c`` where ``found`` is ``c`` times ``expected``, and ``c`` is not 1."""
    if found.shape != expected.shape or not torch.isfinite(found).all() or not float(expected.norm()):
        return None
    times = float((found * expected).sum() / expected.square().sum())
    return times if abs(times - 1) > EXACT and same(found, times * expected) and times else None


def called(value: float, sizes: Mapping[str, float]) -> str | None:
    """A factor in terms of sizes that have a name: ``tp``, ``1/micro-batches``, ``dp x cp``."""
    terms = {name: size for name, size in sizes.items() if size != 1}
    single = [(name, power) for name in terms for power in (1, -1)]
    double = [pair for pair in itertools.combinations(single, 2) if pair[0][0] != pair[1][0]]
    for choice in [*((one,) for one in single), *double]:
        if math.isclose(value, math.prod(terms[name] ** power for name, power in choice), rel_tol=1e-7):
            above = [name for name, power in choice if power > 0]
            below = [name for name, power in choice if power < 0]
            over = f"{' x '.join(above) or '1'}"
            return f"{over} / {' / '.join(below)}" if below else over
    return None


def number(value: float) -> str:
    """A factor as a small fraction, if it is one."""
    near = Fraction(value).limit_denominator(64)
    return str(near) if math.isclose(float(near), value, rel_tol=1e-9, abs_tol=1e-9) else f"{value:.6g}"


def reordered(found: Tensor, expected: Tensor) -> int | None:
    """The dim along which ``found`` is ``expected`` in another order."""
    if found.shape != expected.shape or same(found, expected):
        return None
    for dim in range(found.ndim):
        a, b = (t.movedim(dim, 0).reshape(t.shape[dim], -1) for t in (found, expected))
        if len(a) < 2:
            continue
        distance = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
        nearest = distance.argmin(1)
        if len(set(nearest.tolist())) == len(a) and same(a, b[nearest]):
            return dim
    return None


def precision(found: Tensor, expected: Tensor) -> str | None:
    """The dtype whose rounding is what is wrong: of every element, or of each of a few terms of it."""
    if found.shape != expected.shape or not torch.isfinite(found).all() or not float(expected.norm()):
        return None
    error = float((found - expected).norm() / expected.norm())
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    usual = {dtype: 0.2 * torch.finfo(dtype).eps for dtype in dtypes}
    nearest = min(dtypes, key=lambda dtype: abs(math.log(max(error, 1e-300) / usual[dtype])))
    if not 1 / 8 < error / usual[nearest] < 8:
        return None
    coarse = torch.equal(found, found.float().double())  # it has no more digits than that
    wrong = ((found - expected).abs() / expected.abs().clamp_min(1e-300)).reshape(-1)
    even = float(wrong[torch.randperm(len(wrong))[:10_000]].quantile(0.95)) <= 0.7 * torch.finfo(nearest).eps
    return str(nearest).removeprefix("torch.") if coarse or even else None


def single(found: Tensor, expected: Tensor) -> int | None:
    """How many elements are wrong, where those are few and all others are right."""
    if found.shape != expected.shape or found.numel() < 32:
        return None
    scale = float(expected.square().mean().sqrt())
    wrong = int(((found - expected).abs() > EXACT * (expected.abs() + 1e-3 * scale)).sum())
    return wrong if 0 < wrong <= max(1, found.numel() // 100) else None


def coefficients(found: Tensor, basis: Sequence[Tensor]) -> Tensor | None:
    """How often each of ``basis`` is in ``found``, if it is made of nothing else."""
    matrix = torch.stack([part.reshape(-1) for part in basis], 1)
    if matrix.shape[0] < matrix.shape[1] or not torch.isfinite(found).all():
        return None
    times = torch.linalg.lstsq(matrix, found.reshape(-1, 1), driver="gelsd").solution
    explained = (matrix @ times).view_as(found)
    return times.view(-1) if same(found, explained) else None
