"""Hugging Face's models, spread unmodified: their attention is reached where they look it up, and nothing is cached.

transformers is never imported here; a model that is one of its brings it along.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from phalanx import configs
from phalanx.errors import WrongUse
from phalanx.kernels.documents import are_starts, dense_mask
from phalanx.kernels.packed_attention import packed_attention
from phalanx.parallel.axes.attending import Attending
from phalanx.parallel.torch_private import install

PREFIX = "phalanx-"
OFFERED = ("eager", "sdpa")
UNKNOWN = ("dropout", "softcap", "s_aux", "position_bias", "sliding_window")
"""Options of attention that keep it from that of packed documents."""


def attention_configs(model: nn.Module) -> list[Any]:
    """Every configuration in a model that says how attention is computed, once each."""
    found = {id(c): c for m in model.modules() if hasattr(c := getattr(m, "config", None), "_attn_implementation")}
    return list(found.values())


def prepare(model: nn.Module, dtype: torch.dtype) -> None:
    """Keys of earlier calls are for generating text: in training they would only be kept, or appended to twice.

    Grouped products have no float64, so experts are computed one by one there.
    """
    for config in attention_configs(model):
        if dtype == torch.float64 and hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"
        if configs.read(config, "use_cache"):
            config.use_cache = False


def looks_up_attention(model: nn.Module, config: Any) -> bool:
    """Whether modules with this configuration find attention by name; others call torch's, or write it out by hand."""
    owners = (type(m).__module__ for m in model.modules() if getattr(m, "config", None) is config)
    return any(hasattr(sys.modules.get(owner), "ALL_ATTENTION_FUNCTIONS") for owner in owners)


def check_attention(model: nn.Module, ranks: int) -> None:
    """Refuse attention that cannot be reached where ``cp`` must reach it."""
    for config in attention_configs(model):
        kind = kind_of(config)
        if kind not in OFFERED:
            raise WrongUse(
                f"attn_implementation={kind!r} is not offered with cp. "
                f"Build the model with one of: {', '.join(OFFERED)}."
            )
        if kind == "eager" and not looks_up_attention(model, config):
            offered = getattr(model, "_supports_sdpa", False)
            raise WrongUse(
                f"{type(model).__name__} writes attention out by hand, where cp={ranks} cannot reach it. "
                + ("Build it with attn_implementation='sdpa'." if offered else "Use fsdp or tp instead of cp.")
            )


def kind_of(config: Any) -> str:
    """By which of a model's own ways attention is computed."""
    return (config._attn_implementation or "eager").removeprefix(PREFIX)


def reach_attention(model: nn.Module, context: Attending | None, kinds: Sequence[str] = OFFERED) -> None:
    """Lead attention that a model looks up by name to a context, and to that of packed documents."""
    if context is not None:
        check_attention(model, context.ranks)
    found = [
        config for config in attention_configs(model) if looks_up_attention(model, config) and kind_of(config) in kinds
    ]
    for config in found:
        kind = kind_of(config)
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
    """What a model's attention calls: its own function, with whole keys, or that of packed documents."""
    if kind == "eager":
        own = sys.modules[type(module).__module__].eager_attention_forward
    else:
        own = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS[kind]
    causal = options.pop("is_causal", None)
    causal = getattr(module, "is_causal", True) if causal is None else causal
    packed = are_starts(attention_mask)
    heads, context = query.shape[1], module.phalanx_context

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, first: int = 0) -> Any:
        if are_starts(mask):
            if kind == "sdpa" and not any(options.get(name) for name in UNKNOWN):
                out = packed_attention(query, key, value, mask, causal, options.get("scaling"), first)
                return out.transpose(1, 2).contiguous(), None
            mask, causal = dense_mask(mask, first, query.shape[2], key.shape[2], causal), False
        mask = mask if mask is None or mask.ndim == 4 else mask.view(1, 1, *mask.shape)
        with _of_heads(module, query.shape[1], key.shape[1], heads, 0 if context is None else context.rank):
            return own(module, query, key, value, mask, is_causal=causal, **options)

    # where keys of earlier calls are there, a mask says what is not seen; without one, all is
    causal = causal and (packed or (attention_mask is None and query.shape[2] == key.shape[2]))
    if context is None:
        return attend(query, key, value, attention_mask, causal)
    return context.attention(
        attend, query, key, value, attention_mask, causal, time=1, draws=bool(options.get("dropout")),
    )  # fmt: skip


@contextmanager
def _of_heads(module: Any, queries: int, keys: int, every: int, rank: int) -> Iterator[None]:
    """While this lasts, attention is that of some of ``every`` head here: of a rank of ``cp``, if they are fewer."""
    groups = getattr(module, "num_key_value_groups", None)
    weights = module.named_parameters(recurse=False) if queries < every else ()
    by_head = {name: weight for name, weight in weights if tuple(weight.shape) == (every,)}
    if groups is not None:
        module.num_key_value_groups = queries // keys
    for name, weight in by_head.items():  # as GPT-OSS has its sinks
        install(module, name, weight.narrow(0, rank * queries, queries))
    try:
        yield
    finally:
        for name, weight in by_head.items():
            install(module, name, weight)
        if groups is not None:
            module.num_key_value_groups = groups
