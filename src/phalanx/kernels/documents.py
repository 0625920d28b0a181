"""Where the documents of packed rows begin, as attention is told: found on the host, without waiting for a GPU.

``starts`` are ``[batch, 1, 1, slots]`` in int32: by row, the first position of each document, and in the slots that are
left the row's length, where documents of no token would begin. They go where a mask goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from phalanx.kernels.transfer import sent
from phalanx.parallel.torch_private import of_any_size, version

FEWEST = 16
"""Slots of a row; twice as many where a batch needs them, so that their number hardly ever changes."""
SHORTEST = 8
"""Documents of fewer tokens, on average, are too many to be kept apart this way."""
IDS, POSITIONS = "ids", "positions"


def remember(placed: Tensor, host: Tensor) -> Tensor:
    """A tensor on a GPU that knows what it was copied from."""
    if placed is not host:
        placed.on_host = host, version(placed)  # type: ignore[attr-defined]
    return placed


_recorded = False


@contextmanager
def recorded() -> Iterator[None]:
    """What is computed in here becomes a CUDA graph, now or in a later step: programs are compiled for that."""
    global _recorded
    _recorded = True
    try:
        yield
    finally:
        _recorded = False


def are_starts(mask: Tensor | None) -> TypeGuard[Tensor]:
    return mask is not None and mask.ndim == 4 and mask.shape[2] == 1 and mask.dtype == torch.int32


def starts_of(column: Tensor, kind: str = IDS) -> Tensor | None:
    """From which document each token is of (``ids``), or its ``positions`` there; None where they cannot be had so.

    Without a copy on the host this waits for the GPU.
    """
    if type(column) is not Tensor or column.ndim != 2 or torch.compiler.is_compiling():  # without values, or as if
        return None
    if is_recorded(column):
        return None
    rows = _on_host(column)
    count, length = rows.shape
    step = np.diff(rows, axis=1)
    begins = np.concatenate([np.ones((count, 1), bool), (step != 0) if kind == IDS else (step != 1)], axis=1)
    if kind == IDS and not all(_apart(row[first]) for row, first in zip(rows, begins, strict=True)):
        return None
    most = int(begins.sum(1).max(initial=1))
    if most > max(FEWEST, length // SHORTEST):
        return None
    slots = max(FEWEST, 1 << (most - 1).bit_length())
    starts = np.full((count, slots), length, np.int32)
    row, position = begins.nonzero()
    starts[row, begins.cumsum(1)[begins] - 1] = position
    return of_any_size(sent(torch.from_numpy(starts), column.device).view(count, 1, 1, slots), 3)


def _on_host(column: Tensor) -> np.ndarray:
    host, written = getattr(column, "on_host", (column, -1))
    return (host if written == version(column) else column).cpu().numpy()


def is_recorded(column: Tensor) -> bool:
    """Whether what is done with it becomes a CUDA graph, through which other batches go than the host knows."""
    return column.is_cuda and _recorded


def restart(positions: Tensor) -> bool:
    """Whether positions of any row begin anew, or may do so."""
    if is_recorded(positions):
        return True
    return type(positions) is Tensor and bool((np.diff(_on_host(positions)) != 1).any())


def _apart(ids: np.ndarray) -> bool:
    """Whether no document goes on after another one."""
    return len(np.unique(ids)) == len(ids)


def one_document(rows: int, device: torch.device) -> Tensor:
    """Starts of rows that are a document each."""
    return torch.zeros(rows, 1, 1, 1, dtype=torch.int32, device=device)


def cumulative(starts: Tensor, first: int, length: int) -> Tensor:
    """Cumulative lengths of what documents have in positions ``first`` to ``first + length`` of all rows, flattened."""
    rows = starts.shape[0]
    begins = (starts.flatten(1) - first).clamp(0, length)
    begins = begins + length * torch.arange(rows, dtype=torch.int32, device=starts.device).unsqueeze(1)
    return torch.nn.functional.pad(begins.flatten(), (0, 1), value=rows * length)


def dense_mask(starts: Tensor, first: int, queries: int, keys: int, causal: bool) -> Tensor:
    """True where positions from ``first`` on may look, ``[batch, 1, queries, keys]``; made once for all blocks."""
    if torch.compiler.is_compiling():
        return _dense_mask(starts, first, queries, keys, causal)
    known = vars(starts).setdefault("masks", {})
    which = first, queries, keys, causal
    if which not in known:
        known[which] = _dense_mask(starts, *which)
    return known[which]


def _dense_mask(starts: Tensor, first: int, queries: int, keys: int, causal: bool) -> Tensor:
    places = torch.arange(keys, dtype=torch.int32, device=starts.device)
    documents = (starts.flatten(1).unsqueeze(-1) <= places).sum(1)
    own = documents.narrow(1, first, queries)
    same = own.unsqueeze(2) == documents.unsqueeze(1)
    if causal:
        same = same & (places.narrow(0, first, queries).unsqueeze(1) >= places)
    return same.unsqueeze(1)
