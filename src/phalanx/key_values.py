"""Keys and values of earlier tokens, kept while an answer is made, so that each token of it is computed once.

A model whose forward takes ``key_values`` is given them when it answers: `models/transformer.py` shows how. Rows of
different lengths are padded before their first token, and what is padding is of document -1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class KeyValues:
    """What every attention of a model has computed of the tokens so far."""

    def __init__(self) -> None:
        self._held: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self._documents: Tensor | None = None

    def mask(self, documents_BT: Tensor) -> Tensor:
        """Once a forward: where its tokens may look among all so far, ``[B, 1, T, all]``; back, in their document."""
        known = [] if self._documents is None else [self._documents]
        self._documents = every = torch.cat([*known, documents_BT], dim=1)
        time, length = documents_BT.shape[1], every.shape[1]
        back = torch.ones(time, length, dtype=torch.bool, device=every.device).tril(length - time)
        return ((documents_BT.unsqueeze(2) == every.unsqueeze(1)) & back).unsqueeze(1)

    def extended(self, attention: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of an attention's tokens, ``[B, heads, T, width]``, behind those that it had before."""
        if attention in self._held:
            before = self._held[attention]
            key, value = torch.cat([before[0], key], dim=2), torch.cat([before[1], value], dim=2)
        self._held[attention] = key, value
        return key, value
