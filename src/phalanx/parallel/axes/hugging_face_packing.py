"""Packed documents in Hugging Face's causal models: they are told where each begins, in the place of a mask.

A mask that is made already, of four dims, is handed on by their code as it is, down to the attention that they look up
by name. So it need not look on a GPU whether sequences are packed, which waits for it, and no dense mask is made.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.attention import document_mask
from phalanx.kernels.documents import POSITIONS, is_recorded, restart, starts_of
from phalanx.kernels.packed_attention import refusal, say_dense
from phalanx.parallel.axes.context import ContextParallel
from phalanx.parallel.axes.hugging_face import configs, kind_of, looks_up_attention, reach_attention
from phalanx.parallel.forward.wrapper import Forward, Layer, wrap

FULL = "full_attention"


def bases(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that make masks: each language model's own, below its head."""
    for module in model.modules():
        if getattr(module, "base_model", None) is module and hasattr(_source(module), "create_causal_mask"):
            yield module


def _source(module: nn.Module) -> Any:
    return sys.modules.get(type(module).__module__)


def unfit(base: nn.Module) -> str:
    """Why a model's attention is not that inside documents alone; empty: it is."""
    config: Any = base.config
    if {kind_of(one) for one in configs(base)} != {"sdpa"} or not all(
        looks_up_attention(base, one) for one in configs(base)
    ):
        return f"{type(base).__name__} does not look up attn_implementation='sdpa' by name"
    if getattr(config, "sliding_window", None) or any(
        kind != FULL for kind in getattr(config, "layer_types", None) or ()
    ):
        return f"attention of {type(base).__name__} is not full in all its blocks"
    if getattr(config, "attn_logit_softcapping", None) or getattr(config, "reorder_and_upcast_attn", False):
        return f"attention of {type(base).__name__} caps or reorders its scores"
    if any(hasattr(module, "sinks") for module in base.modules()) or not getattr(config, "is_causal", True):
        return f"attention of {type(base).__name__} has sinks, or is not causal"
    return ""


def keep_apart(
    model: nn.Module, shadows: Iterable[nn.Module], context: ContextParallel | None, dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    """Have packed documents told to every model that can be told. ``shadows``: blocks as one device has them."""
    found = {base: unfit(base) for base in bases(model)}
    if any(not why for why in found.values()):
        for block in shadows:
            reach_attention(block, None, ["sdpa"])
        if context is None:
            reach_attention(model, None, ["sdpa"])
    for base, why in found.items():
        config: Any = base.config
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        names = list(inspect.signature(base.forward).parameters)
        wrap(base, DocumentStarts(why or refusal(device, dtype, width), device, names))


class DocumentStarts(Layer):
    """Tells a model where documents begin, if it is given positions that do so."""

    title = "documents"

    def __init__(self, why: str, device: torch.device, names: Sequence[str]) -> None:
        """``why`` it cannot be told; ``names`` of what it is called with."""
        self.why, self.names = why, names
        self.none = torch.zeros(1, 1, 1, 0, dtype=torch.int32, device=device)
        self.packed = False
        """Whether positions have begun anew in any call: from then on all are computed by one program."""

    def __call__(self, rest: Forward, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self.names, args, strict=False)) | kwargs
        if given.get("attention_mask") is None and given.get("past_key_values") is None:
            given["attention_mask"] = self._mask(given.get("position_ids"), given.get("input_ids"))
        return rest(**given)

    def _mask(self, positions: Tensor | None, tokens: Tensor | None) -> Tensor | None:
        if positions is None or tokens is None or positions.shape != tokens.shape:
            return None if self.why or positions is not None else self.none
        if not (self.packed or restart(positions)):
            return None if self.why else self.none
        starts, self.packed = None if self.why else starts_of(positions, POSITIONS), True
        if starts is None:
            say_dense(self.why, positions)
            if not self.why and is_recorded(positions):
                return document_mask(positions.diff(prepend=positions[:, :1]).ne(1).cumsum(1))
        return starts
