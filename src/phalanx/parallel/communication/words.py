"""Words between ranks: JSON as bytes, bounded. Not pickled: whoever unpickles runs what the sender likes."""

from __future__ import annotations

import json

import torch
from torch import Tensor

MOST_BYTES = 1 << 24
"""Of the words that one rank can say at once."""


def spelled(words: list[str], device: torch.device | str) -> Tensor:
    letters = bytearray(json.dumps(words).encode())
    bounded(len(letters))
    return torch.frombuffer(letters, dtype=torch.uint8).to(device)


def read(letters: Tensor) -> list[str]:
    words = json.loads(letters.cpu().numpy().tobytes())
    if not (isinstance(words, list) and all(isinstance(word, str) for word in words)):
        raise ValueError("a rank sent what is no list of words")
    return words


def bounded(size: int) -> int:
    if not 0 < size <= MOST_BYTES:
        raise ValueError(f"a rank sends words of {size} bytes; there can be 1 to {MOST_BYTES}")
    return size
