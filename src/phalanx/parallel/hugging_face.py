"""Hugging Face's models, spread unmodified: their attention is reached where they look it up, and nothing is cached.

transformers is never imported here; a model that is one of its brings it along.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import WrongUse
from phalanx.parallel.context import ContextParallel

PREFIX = "phalanx-"
OFFERED = ("eager", "sdpa")


def configs(model: nn.Module) -> list[Any]:
    """Every configuration in a model that says how attention is computed, once each."""
    found = {id(c): c for m in model.modules() if hasattr(c := getattr(m, "config", None), "_attn_implementation")}
    return list(found.values())


def prepare(model: nn.Module, dtype: torch.dtype) -> None:
    """Keys of earlier calls are for generating text: in training they would only be kept, or appended to twice.

    Grouped products have no float64, so experts are computed one by one there.
    """
    for config in configs(model):
        if dtype == torch.float64 and hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"
        if getattr(config, "use_cache", False):
            config.use_cache = False


def reach_attention(model: nn.Module, context: ContextParallel) -> None:
    """Lead attention that a model looks up by name to a context."""
    for config in configs(model):
        kind = (config._attn_implementation or "eager").removeprefix(PREFIX)
        if kind not in OFFERED:
            raise WrongUse(
                f"attn_implementation={kind!r} is not offered with cp. "
                f"Build the model with one of: {', '.join(OFFERED)}."
            )
        masking, modeling = sys.modules["transformers.masking_utils"], sys.modules["transformers.modeling_utils"]
        modeling.ALL_ATTENTION_FUNCTIONS.register(PREFIX + kind, partial(_attention, kind))
        masking.ALL_MASK_ATTENTION_FUNCTIONS.register(PREFIX + kind, masking.ALL_MASK_ATTENTION_FUNCTIONS[kind])
        config._attn_implementation = PREFIX + kind
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_attn_implementation"):
            module.phalanx_context = context  # type: ignore[assignment]


def _attention(
    kind: str, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> Any:
    """What a model's attention calls: its own function, with whole keys."""
    if kind == "eager":
        own = sys.modules[type(module).__module__].eager_attention_forward
    else:
        own = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS[kind]
    causal = options.pop("is_causal", None)
    causal = getattr(module, "is_causal", True) if causal is None else causal

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Any:
        groups = getattr(module, "num_key_value_groups", None)
        if groups is not None:
            module.num_key_value_groups = query.shape[1] // key.shape[1]
        try:
            mask = mask if mask is None or mask.ndim == 4 else mask.view(1, 1, *mask.shape)
            return own(module, query, key, value, mask, is_causal=causal, **options)
        finally:
            if groups is not None:
                module.num_key_value_groups = groups

    return module.phalanx_context.attention(
        attend, query, key, value, attention_mask, causal and attention_mask is None,
        time=1, draws=bool(options.get("dropout")),
    )  # fmt: skip
