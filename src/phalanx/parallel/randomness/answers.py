"""Torch's own random functions, answered by keyed draws while a micro-batch is computed.

A function mode looks at every torch call of the model, which costs a few microseconds each. So a model that called no
random function in its first step is from then on only watched: `check_unmoved` refuses it if it draws after all.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from phalanx.errors import WrongUse
from phalanx.parallel.randomness.draws import Randomness
from phalanx.parallel.randomness.masked_spans import computing, key_masked_spans
from phalanx.parallel.randomness.recurrent import RECURRENT, draws_between_layers, follow_packed, recurrent


class Answers(TorchFunctionMode):
    """Leads random functions to a `Randomness`; a call that brings its own generator is left alone.

    ``before`` are functions that a parallelism answers first: each is given what would have answered, and the call.
    """

    def __init__(self, randomness: Randomness, before: Mapping[Any, Callable[..., Any]] | None = None) -> None:
        super().__init__()
        self.randomness, self.before = randomness, dict(before or {})
        randomness.asked |= bool(before)
        if randomness.model is not None:
            follow_packed(randomness.model, randomness)
            key_masked_spans(randomness.model)

    def __enter__(self) -> Any:
        computing.append(self.randomness)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        computing.pop()
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.before:
            return self.before[func](partial(self._answer, func), *args, **kwargs)
        return self._answer(func, *args, **kwargs)

    def _answer(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        answer = ANSWERS.get(func)
        if answer is None or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        self.randomness.asked |= func not in DRAW_IF_TOLD
        return answer(self.randomness, func, *args, **kwargs)


def _dropout(
    draw: Randomness, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or p == 0:
        return input
    dropped = draw.dropped(input, p)
    return input.copy_(dropped) if inplace else dropped


def _feature_dropout(
    draw: Randomness, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Whole channels at a time, as F.dropout1d, 2d and 3d do."""
    if not training or p == 0:
        return input
    spatial = SPATIAL[func]
    leading = input.ndim - spatial
    dropped = draw.dropped(input, p, torch.Size([*input.shape[:leading], *[1] * spatial]))
    return input.copy_(dropped) if inplace else dropped


def _attention(
    draw: Randomness,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention, written out where its weights are dropped: the fused kernels draw their own mask."""
    if not dropout_p:
        return func(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(ahead, float("-inf"))
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else scores + attn_mask
    return draw.dropped(scores.softmax(-1), dropout_p) @ value


def _multi_head_attention(draw: Randomness, func: Any, *args: Any, **kwargs: Any) -> Any:
    """torch's own multi-head attention drops inside, out of a function mode's sight."""

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return _dropout(draw, None, input, p, training, inplace)

    def attention(*inner: Any, **options: Any) -> Tensor:
        return _attention(draw, originals[1], *inner, **options)

    originals = F.dropout, F.scaled_dot_product_attention
    F.dropout, F.scaled_dot_product_attention = dropout, attention
    try:
        return func(*args, **kwargs)
    finally:
        F.dropout, F.scaled_dot_product_attention = originals


def _size(args: tuple[Any, ...], options: dict[str, Any]) -> torch.Size:
    sizes = args or (options.pop("size"),)
    return torch.Size(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)


def _factory(draws: Callable[[Randomness], Callable[..., Tensor]]) -> Callable[..., Tensor]:
    """Answers ``torch.rand(2, 3, ...)`` and ``torch.randn(...)``."""

    def answer(draw: Randomness, func: Any, *args: Any, **options: Any) -> Tensor:
        size = _size(args, options)
        empty = torch.empty(size, **{n: v for n, v in options.items() if n in ("dtype", "device", "requires_grad")})
        return empty.detach().copy_(draws(draw)(size)).requires_grad_(empty.requires_grad)

    return answer


def _like(draws: Callable[[Randomness], Callable[..., Tensor]]) -> Callable[..., Tensor]:
    """Answers ``torch.rand_like(x)`` and ``torch.randn_like(x)``."""

    def answer(draw: Randomness, func: Any, input: Tensor, **options: Any) -> Tensor:
        empty = torch.empty_like(input, **{n: v for n, v in options.items() if n in ("dtype", "device")})
        return empty.copy_(draws(draw)(empty.shape, input))

    return answer


def _bernoulli(draw: Randomness, func: Any, input: Tensor, p: float | None = None) -> Tensor:
    threshold = input.detach() if p is None else p
    return (draw.uniform(input.shape, input) < threshold).to(input.dtype)


def _bernoulli_(draw: Randomness, func: Any, input: Tensor, p: float | Tensor = 0.5) -> Tensor:
    return input.copy_(draw.uniform(input.shape, input) < p)


def _uniform_(draw: Randomness, func: Any, input: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return input.copy_(draw.uniform(input.shape, input) * (high - low) + low)


def _normal_(draw: Randomness, func: Any, input: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return input.copy_(draw.normal(input.shape, input) * std + mean)


def _exponential_(draw: Randomness, func: Any, input: Tensor, lambd: float = 1.0) -> Tensor:
    return input.copy_(-torch.log1p(-draw.uniform(input.shape, input)) / lambd)


def _gumbel_softmax(
    draw: Randomness, func: Any, logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Tensor:
    noise = -torch.log(-torch.log(draw.uniform(logits.shape, logits).clamp_min(1e-300)))
    soft = ((logits + noise.to(logits.dtype)) / tau).softmax(dim)
    if not hard:
        return soft
    picked = torch.zeros_like(soft).scatter_(dim, soft.argmax(dim, keepdim=True), 1.0)
    return picked - soft.detach() + soft


def _randint(draw: Randomness, func: Any, *args: Any, **options: Any) -> Tensor:
    names = ("low", "high", "size") if len(args) == 3 or (len(args) < 3 and "low" in options) else ("high", "size")
    given = dict(zip(names, args, strict=False)) | options
    low, high, size = given.get("low", 0), given["high"], given["size"]
    empty = torch.empty(size, **{"dtype": torch.int64} | {n: v for n, v in options.items() if n in ("dtype", "device")})
    return empty.copy_((draw.uniform(empty.shape) * (high - low)).floor() + low)


DRAW_IF_TOLD = {F.scaled_dot_product_attention, *RECURRENT}
"""Functions that models call all the time, and that draw only where an argument says so."""
SPATIAL = {F.dropout1d: 1, F.dropout2d: 2, F.dropout3d: 3}
"""By function, how many dims a channel has."""
ANSWERS: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout,
    torch.dropout: lambda draw, func, input, p, train: _dropout(draw, func, input, p, train),
    F.dropout1d: _feature_dropout,
    F.dropout2d: _feature_dropout,
    F.dropout3d: _feature_dropout,
    F.gumbel_softmax: _gumbel_softmax,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head_attention,
    **dict.fromkeys(RECURRENT, recurrent),
    torch.rand: _factory(lambda draw: draw.uniform),
    torch.randn: _factory(lambda draw: draw.normal),
    torch.rand_like: _like(lambda draw: draw.uniform),
    torch.randn_like: _like(lambda draw: draw.normal),
    torch.randint: _randint,
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    Tensor.bernoulli_: _bernoulli_,
    Tensor.uniform_: _uniform_,
    Tensor.normal_: _normal_,
    Tensor.exponential_: _exponential_,
}


Generators = tuple[bytes | int | tuple[Any, ...], ...]


def generator_state(device: torch.device) -> Generators:
    """The states of torch's, Python's and numpy's own generators, which nothing may move while a model computes."""
    _, keys, *rest = np.random.get_state(legacy=True)
    return (*torch_generators(device), random.getstate(), np.asarray(keys).tobytes(), *rest)


def torch_generators(device: torch.device) -> tuple[bytes, ...]:
    """The states of torch's own alone."""
    states = [torch.default_generator.get_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return tuple(state.numpy().tobytes() for state in states)


def check_unmoved(before: Generators, device: torch.device) -> None:
    """Refuse a model that drew from them: its numbers would depend on the layout."""
    if before != generator_state(device):
        raise drew()


class BackwardDraws:
    """Refuses random numbers in a backward pass, where nothing is keyed: those of what a model recomputes by itself.

    The functions are replaced where models look them up, since a function mode is off inside of a backward.
    """

    def __init__(self, randomness: Randomness) -> None:
        self.randomness = randomness
        self._plain: list[tuple[Any, str, Any]] = [
            (module, name, func) for module in (F, torch) for func in ANSWERS
            for name in [getattr(func, "__name__", "")] if vars(module).get(name) is func
        ]  # fmt: skip

    def __enter__(self) -> None:
        self._before = torch_generators(self.randomness.device)
        for module, name, func in self._plain:
            setattr(module, name, self._checked(module, name, func))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for module, name, func in self._plain:
            setattr(module, name, func)
        if kind is None and self._before != torch_generators(self.randomness.device):
            raise drew_in_backward("draws random numbers")

    def _checked(self, module: Any, name: str, func: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(func)
        def call(*args: Any, **kwargs: Any) -> Any:
            keyed = self.randomness.inside or kwargs.get("generator") is not None
            if not keyed and _draws(func, args, kwargs):
                raise drew_in_backward(f"calls {name}")
            setattr(module, name, func)  # functions of torch's look themselves up when they ask a function mode
            try:
                return func(*args, **kwargs)
            finally:
                setattr(module, name, call)

        return call


def drew_in_backward(what: str) -> WrongUse:
    """What is told then."""
    return WrongUse(
        f"the model {what} in its backward pass, where they would not be those of the forward pass. If it recomputes "
        "activations by code of its own, use torch.utils.checkpoint, or leave it out and train with --layout "
        "recompute=full. Other draws in a backward take a generator= of their own."
    )


def _draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of a random function draws: dropout does so only in training, attention with ``dropout_p``."""

    def given(place: int, name: str, default: Any) -> Any:
        return args[place] if len(args) > place else kwargs.get(name, default)

    if func is F.scaled_dot_product_attention:
        return bool(given(4, "dropout_p", 0.0))
    if func in RECURRENT:
        return draws_between_layers(args)
    if func is F.multi_head_attention_forward:
        return False  # what it calls is seen
    if func in SPATIAL or func in (F.dropout, torch.dropout):
        return bool(given(1, "p", 0.5)) and bool(given(2, "training", kwargs.get("train", True)))
    return True


def drew(where: str = "") -> WrongUse:
    """What is told then."""
    known = ", ".join(sorted({f"{getattr(f, '__name__', f)}" for f in ANSWERS}))
    advice = ""
    if "randperm" in where:
        advice = " To mix the samples of a batch: phalanx.data.Mixup, CutMix."
    elif re.search(r"\bnn\.[A-Z]\w*\(", where):
        advice = " A layer that is made in forward is another one each time: make it in the constructor."
    return WrongUse(
        "the model drew random numbers whose values would depend on how the job is spread, from a generator of "
        f"torch's, numpy's or Python's own{where}. Draw with one of these functions, from the first step on: {known}."
        f"{advice}"
    )
