"""Packed documents in Hugging Face's causal models: where each begins goes in the place of the mask they would make.

Their functions that make masks look at positions for documents, which waits on a GPU, and make a dense mask if they
find any. Here those functions are told what the host knows: that a batch is not packed, or where its documents begin.
The model itself is called with what it was given, and nothing else.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx import configs
from phalanx.attention import document_mask
from phalanx.kernels.documents import POSITIONS, is_recorded, restart, starts_of
from phalanx.kernels.packed_attention import refusal, say_dense
from phalanx.parallel.axes.context import ContextParallel
from phalanx.parallel.axes.hugging_face import attention_configs, kind_of, looks_up_attention, reach_attention
from phalanx.parallel.forward.wrapper import Forward, Layer, wrap

CAUSAL = "create_causal_mask"
MASKS = (CAUSAL, "create_sliding_window_causal_mask", "create_chunked_causal_mask")
"""Functions of transformers that make masks, and look at positions for documents."""
COUNTS_PADDING = "create_position_ids_from_input_ids"
"""A function of models whose positions restart at padding: what they look for is in the tokens."""
OTHER_MASKS = ("attention_mask", "past_key_values", "or_mask_function", "and_mask_function", "block_sequence_ids")
"""Arguments of theirs by which a mask says more than where documents begin."""

_known: list[Tensor | bool | None] = []
"""By language model that computes now, innermost last: where documents begin (or a mask that says so), False where
nothing is packed, None where the host does not know."""


def bases(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that make causal masks: each language model's own, below its head."""
    for module in model.modules():
        source = _source(module)
        counts = hasattr(source, COUNTS_PADDING) or any(hasattr(inner, COUNTS_PADDING) for inner in module.modules())
        if getattr(module, "base_model", None) is module and hasattr(source, CAUSAL) and not counts:
            yield module


def _source(module: nn.Module) -> Any:
    return sys.modules.get(type(module).__module__)


def unfit(base: nn.Module) -> str:
    """Why a model's attention is not that inside documents alone; empty: it is."""
    name, own = type(base).__name__, attention_configs(base)
    if {kind_of(one) for one in own} != {"sdpa"} or not all(looks_up_attention(base, one) for one in own):
        return f"{name} does not look up attn_implementation='sdpa' by name"
    if configs.attention_differs(base.config):
        return f"attention of {name} is not full in all its blocks"
    if configs.scores_are_changed(base.config):
        return f"attention of {name} caps or reorders its scores"
    if any(hasattr(module, "sinks") for module in base.modules()) or not configs.is_causal(base.config):
        return f"attention of {name} has sinks, or is not causal"
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
        names = list(inspect.signature(base.forward).parameters)
        wrap(base, DocumentStarts(why or refusal(device, dtype, configs.head_width(base.config)), names))
        _lead_masks(_source(base))


def _lead_masks(source: Any) -> None:
    """Have a module's functions that make masks ask here first."""
    for name in MASKS:
        own: Callable[..., Any] | None = getattr(source, name, None)
        if own is None or hasattr(own, "phalanx"):
            continue
        names = list(inspect.signature(own).parameters)
        if "position_ids" in names:
            led = functools.wraps(own)(functools.partial(_mask, own, name == CAUSAL, names))
            led.phalanx = True  # type: ignore[attr-defined]
            setattr(source, name, led)


def _mask(own: Callable[..., Any], full: bool, names: list[str], *args: Any, **kwargs: Any) -> Any:
    """A mask as their function makes it, without a look at positions whose documents the host knows of.

    ``full``: of attention to all earlier positions; ``names`` of what the function is called with.
    """
    known = _known[-1] if _known else None
    if known is None:
        return own(*args, **kwargs)
    given = dict(zip(names, args, strict=False)) | kwargs
    if known is False:
        return own(**given | {"position_ids": None})
    return known if full and all(given.get(name) is None for name in OTHER_MASKS) else own(**given)


class DocumentStarts(Layer):
    """Notes where documents begin while a model computes, if it is given positions that begin anew."""

    title = "documents"

    def __init__(self, why: str, names: Sequence[str]) -> None:
        """``why`` it cannot be told; ``names`` of what it is called with."""
        self.why, self.names = why, names
        self.packed = False
        """Whether positions have begun anew in any call: from then on all are computed by one program."""

    def __call__(self, rest: Forward, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self.names, args, strict=False)) | kwargs
        masked = given.get("attention_mask") is not None or given.get("past_key_values") is not None
        _known.append(None if masked else self._documents(given.get("position_ids"), given.get("input_ids")))
        try:
            return rest(*args, **kwargs)
        finally:
            _known.pop()

    def _documents(self, positions: Tensor | None, tokens: Tensor | None) -> Tensor | bool | None:
        if positions is None:
            return False
        if tokens is None or positions.shape != tokens.shape:
            return None
        if not (self.packed or restart(positions)):
            return False
        starts, self.packed = None if self.why else starts_of(positions, POSITIONS), True
        if starts is None:
            say_dense(self.why, positions)
            if not self.why and is_recorded(positions):
                return document_mask(positions.diff(prepend=positions[:, :1]).ne(1).cumsum(1))
        return starts
