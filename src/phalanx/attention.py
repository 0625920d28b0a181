"""Attention inside packed documents, for models of one's own: `models/transformer.py` shows how.

A model has its documents kept apart once, before its blocks, and attention looks by what: where they begin, which
`packed_attention` takes, or a dense mask. A module with ``packed_attention`` as its attribute is given that of ``cp``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.kernels.documents import are_starts, starts_of
from phalanx.kernels.packed_attention import packed_attention, refusal, say_dense

__all__ = ["are_starts", "document_mask", "kept_apart", "packed_attention"]


def kept_apart(documents: Tensor, like: Tensor, head_width: int, causal: bool = True) -> Tensor:
    """What keeps documents apart in attention of numbers ``like`` these: where they begin, or a dense mask.

    ``documents``: ``[batch, time]``, from which each token is. Given as the batch has it, nobody waits for the GPU.
    """
    why = refusal(like.device, like.dtype, head_width)
    starts = None if why else starts_of(documents)
    if starts is not None:
        return starts
    say_dense(why, documents)
    return document_mask(documents, causal)


def document_mask(documents_BT: Tensor, causal: bool = True) -> Tensor:
    """True where a token may look: inside its own document, and only back if ``causal``. ``[B, 1, T, T]``."""
    time = documents_BT.shape[1]
    same = documents_BT.unsqueeze(2) == documents_BT.unsqueeze(1)
    if not causal:
        return same.unsqueeze(1)
    return (same & torch.ones(time, time, dtype=torch.bool, device=documents_BT.device).tril()).unsqueeze(1)
