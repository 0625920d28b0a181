"""A sample of packed documents: ids of one length, and which of them belong to which document."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

IGNORE = -100


def packed(tokens: np.ndarray, ends: np.ndarray, length: int, pad: int = 0) -> dict[str, Tensor]:
    """A sample of ``length`` places from so many tokens and the one after them, or fewer at the end of all.

    ``ends``: where documents end that end in these tokens, counted from the first. The sample has ``tokens``;
    ``targets``, the next token, or -100 where the next one belongs to another document; ``documents``, which document
    each token is from; and ``positions``, counted from its document's start or, in a document that began before, from
    the sample's. What a sample is filled up with is one more document.
    """
    place = np.arange(min(length, len(tokens) - 1))
    document = np.searchsorted(ends, place, side="right")
    begins = np.concatenate([[0], ends])[document]
    last = np.isin(place + 1, ends)
    sample = {
        "tokens": _padded(tokens[place], length, pad),
        "targets": _padded(np.where(last, IGNORE, tokens[place + 1].astype(np.int64)), length, IGNORE),
        "documents": _padded(document - (document[0] if len(document) else 0), length, -1),
        "positions": np.concatenate([place - begins, np.arange(length - len(place))]),
    }
    return {name: torch.from_numpy(column) for name, column in sample.items()}


def _padded(column: np.ndarray, length: int, fill: int) -> np.ndarray:
    """The last sample may be short: it is filled up with targets that do not count."""
    return np.pad(column.astype(np.int64), (0, length - len(column)), constant_values=fill)
