"""A text embedder: a language model of Hugging Face's without its head, and one vector for each text."""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from torch import Tensor, nn

from phalanx.errors import WrongUse

Pooling = Literal["mean", "cls", "last"]
"""What is taken of a text's tokens: their mean, the first, or the last."""


class Embedder(nn.Module):
    """``tokens`` of texts, ``[samples, texts, time]``, of which the first ``lengths`` count, to vectors of them.

    The body stands under the name that heads of its kind know it by, so that files of either are read and written.
    """

    def __init__(self, body: nn.Module, pooling: Pooling) -> None:
        super().__init__()
        self.body_name = str(getattr(body, "base_model_prefix", "") or "model")
        self.add_module(self.body_name, body)
        self.pooling, self.config = pooling, body.config
        self.sequences = 1
        """How many texts a sample has: each has draws of its own."""
        self._pp_plan = getattr(body, "_pp_plan", None) or {}
        self._tp_plan = {
            f"{self.body_name}.{name}": how for name, how in (getattr(body, "_tp_plan", None) or {}).items()
        }

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        samples, self.sequences, time = tokens.shape
        lengths = lengths.flatten()
        mask = torch.arange(time, device=tokens.device) < lengths[:, None]
        body = getattr(self, self.body_name)
        hidden = body(input_ids=tokens.flatten(0, 1), attention_mask=mask.long()).last_hidden_state
        return pooled(hidden, mask, self.pooling).unflatten(0, (samples, self.sequences))


def pooled(hidden: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """One vector for each text, of its tokens that count; those stand first."""
    if pooling == "cls":
        return hidden[:, 0]
    if pooling == "last":
        return hidden[torch.arange(len(hidden), device=hidden.device), mask.sum(1) - 1]
    counts = mask.to(hidden.dtype).unsqueeze(-1)
    return (hidden * counts).sum(1) / counts.sum(1)


def embedder(config: Any, pooling: Pooling) -> Embedder:
    """An embedder of this configuration, with weights of its own."""
    import transformers

    try:
        kind = transformers.MODEL_MAPPING[type(config)]
    except KeyError:
        raise WrongUse(f"{type(config).__name__} is of no model that makes vectors of texts. Give another.") from None
    config = copy.deepcopy(config)
    config.is_encoder_decoder = False
    try:
        body = kind(config, add_pooling_layer=False)  # which nothing here uses
    except TypeError:
        body = kind(config)
    return Embedder(body, pooling)
