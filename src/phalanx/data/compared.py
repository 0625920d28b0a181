"""Samples of two sequences each, side by side: a better answer and a worse one, or an answer and a mismatched one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.data.packing import IGNORE
from phalanx.data.preferences import Judged, Pair
from phalanx.data.supervised import Document, columns
from phalanx.words import many

FILLS = {"tokens": 0, "targets": IGNORE}


class Compared:
    """Pairs of answers. A sample has ``tokens`` and ``targets`` of both, ``[2, time]``, the better one first."""

    def __init__(self, pairs: Sequence[Pair], pad: int = 0) -> None:
        self.pairs, self.pad = pairs, pad

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        chosen, rejected = self.pairs[index]
        return two(chosen.document, rejected.document, self.pad)

    def lengths(self) -> list[int]:
        """Tokens of both sequences of each sample, padding too."""
        return [2 * max(len(answer.ids) for answer in pair) for pair in self.pairs]

    def describe(self) -> str:
        """How many there are, and how long."""
        sizes = [len(answer.ids) for pair in self.pairs for answer in pair]
        return f"{many(len(self), 'pair')}, the longest answer with its prompt has {max(sizes):,} tokens"


class Judgements:
    """Answers that are good or not, each beside a mismatched one.

    That has the same prompt, and the answer of the last row before it that has another prompt; before the first row, it
    is as if the last ones stood there.
    """

    def __init__(self, judged: Sequence[Judged], length: int, pad: int = 0) -> None:
        self.judged, self.length, self.pad = judged, length, pad
        self.prompts = [each.answer.ids[: each.answer.start].tobytes() for each in judged]

    def __len__(self) -> int:
        return len(self.judged)

    def mismatched(self, index: int) -> int:
        """The row whose answer is put behind this one's prompt; itself, where all have the same prompt."""
        back = ((index - step) % len(self) for step in range(1, len(self)))
        return next((other for other in back if self.prompts[other] != self.prompts[index]), index)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        sample = two(self.judged[index].answer.document, self._mismatched(index), self.pad)
        return {**sample, "good": torch.tensor(float(self.judged[index].good))}

    def _mismatched(self, index: int) -> Document:
        return self.judged[self.mismatched(index)].answer.after(self.judged[index].answer, self.length)

    def lengths(self) -> list[int]:
        """Tokens of both sequences of each sample, padding too."""
        return [2 * max(len(each.answer.ids), len(self._mismatched(n)[0])) for n, each in enumerate(self.judged)]

    def describe(self) -> str:
        """How many there are of each kind, and how long."""
        good = sum(each.good for each in self.judged)
        longest = max(len(each.answer.ids) for each in self.judged)
        return f"{good:,} good and {len(self) - good:,} bad, the longest answer with its prompt has {longest:,} tokens"


def two(first: Document, second: Document, pad: int) -> dict[str, Tensor]:
    """Two sequences as one sample, both as long as the longer one."""
    longest = max(len(first[0]), len(second[0]))
    fills = FILLS | {"tokens": pad}
    found: dict[str, list[np.ndarray]] = {name: [] for name in FILLS}
    for document in (first, second):
        own = columns(*document)
        for name in FILLS:
            found[name].append(np.pad(own[name], (0, longest - len(own[name])), constant_values=fills[name]))
    return {name: torch.from_numpy(np.stack(both)) for name, both in found.items()}


def stacked(samples: Sequence[Mapping[str, Any]], pad: int) -> dict[str, Tensor]:
    """Samples of different lengths as one batch, as long as the longest; other columns are stacked as they are."""
    longest = max(sample["tokens"].shape[-1] for sample in samples)
    fills = FILLS | {"tokens": pad}
    found = {
        name: torch.stack([F.pad(s[name], (0, longest - s[name].shape[-1]), value=fills[name]) for s in samples])
        for name in FILLS
    }
    return found | {name: torch.stack([s[name] for s in samples]) for name in samples[0] if name not in FILLS}
