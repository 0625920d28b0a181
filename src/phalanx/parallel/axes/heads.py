"""Heads: which features of attention's projections belong to which of them, and so to which rank of ``tp``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from phalanx.errors import WrongUse
from phalanx.parallel.communication.differentiable import run

Span = tuple[int, int]
HEAD_WIDTHS = ("head_dim", "head_width", "head_size", "attention_head_size", "d_head")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
QUERIES = frozenset(["q_proj", "query", "wq", "q"])
KEYS = frozenset(["k_proj", "v_proj", "key", "value", "wk", "wv", "k", "v"])
FUSED = frozenset(["qkv_proj", "qkv", "c_attn", "in_proj", "Wqkv"])
"""Queries of all heads, then keys, then values."""
BY_HEAD = frozenset(["query_key_value"])
"""Query, key and value of one head, then of the next."""
COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "split_size")
"""Attributes of attention modules that say how much of it there is."""


def attends(names: Sequence[str]) -> bool:
    """Whether linears with these names are attention's."""
    return bool(set(names) & (QUERIES | KEYS | FUSED | BY_HEAD))


def features(module: Any, out: bool) -> int:
    """How many features a linear gives, or takes."""
    if module.weight is None:  # kept as something else
        return int(module.out_features if out else module.in_features)
    return int(module.weight.shape[(not out) == isinstance(module, nn.Linear)])


def part(total: int, ranks: int, rank: int, offset: int = 0, width: int = 1) -> Span:
    """A rank's run of so many parts of some width."""
    start, stop = run(total, ranks, rank)
    return offset + start * width, offset + stop * width


def unclear(name: str, size: int, width: int, heads: int, ranks: int) -> str:
    """Why it cannot be told which features of a projection belong to which rank; empty if it can."""
    last = name.rpartition(".")[2]
    fits = size == 3 * heads * width if last in BY_HEAD else size % width == 0 and size >= width
    keys, odd = divmod(size // width - heads, 2)
    if last in FUSED and fits and keys > 0 and not odd and keys % ranks:
        return f"{name} has {keys} key-value heads beside its queries, which tp={ranks} does not divide"
    if last in FUSED:
        fits = fits and keys > 0 and not odd
    return "" if fits else f"{name} gives {size} features, not query, key and value of {heads} heads of {width}"


def head_spans(name: str, size: int, width: int, heads: int, ranks: int) -> list[tuple[Span, ...]]:
    """The outputs of a projection that belong to each rank's heads."""
    last = name.rpartition(".")[2]
    if last in BY_HEAD:
        return [(part(heads, ranks, r, 0, size // heads),) for r in range(ranks)]
    if last in FUSED:
        keys = (size // width - heads) // 2
        starts = [0, heads * width, (heads + keys) * width]
        parts = [
            _spans_of_heads(name, count, width, ranks, start)
            for count, start in zip((heads, keys, keys), starts, strict=True)
        ]
        return [tuple(spans[r] for spans in parts) for r in range(ranks)]
    return [(span,) for span in _spans_of_heads(name, size // width, width, ranks, 0)]


def _spans_of_heads(name: str, heads: int, width: int, ranks: int, offset: int) -> list[Span]:
    """Heads dealt to ranks; where there are fewer, several ranks hold the same one."""
    if heads % ranks == 0:
        return [part(heads, ranks, r, offset, width) for r in range(ranks)]
    if ranks % heads == 0:
        return [(offset + r * heads // ranks * width, offset + (r * heads // ranks + 1) * width) for r in range(ranks)]
    raise WrongUse(
        f"{name} has {heads} key-value heads and tp={ranks}: neither divides the other. "
        f"Use a tp that divides {heads}, such as tp={divisor(heads, ranks)}."
    )


def divisor(number: int, below: int) -> int:
    return max(n for n in range(1, below + 1) if number % n == 0)


def attribute(module: nn.Module, names: Sequence[str]) -> int | None:
    """The first of these that a module, or one inside it, has as a number."""
    for inner in module.modules():
        for name in names:
            value = getattr(inner, name, None)
            if isinstance(value, int):
                return value
    return None


def beliefs(container: nn.Module, heads: int, ranks: int) -> dict[str, int]:
    """Counts of heads and the like, as they are for one rank."""
    counted = [
        n for n, value in vars(container).items()
        if type(value) is int and "head" in n and value == heads and n not in HEAD_WIDTHS
    ]  # fmt: skip
    found = {
        name: getattr(container, name) // ranks
        for name in {*COUNTS, *counted}
        if isinstance(getattr(container, name, None), int)
    }
    groups = getattr(container, "num_key_value_groups", None)
    keys = [name for name in KV_HEADS if isinstance(getattr(container, name, None), int)]
    if isinstance(groups, int):
        whole = heads // groups
        found["num_key_value_groups"] = heads // ranks // max(1, whole // ranks)
    return found | {name: max(1, getattr(container, name) // ranks) for name in keys}


def config_beliefs(container: nn.Module, heads: int, ranks: int) -> dict[str, int]:
    """Likewise in a configuration that attention itself reads: Phi-3 slices by it."""
    held = getattr(getattr(container, "config", None), "__dict__", {})
    counts = {n: value for n in (*COUNTS, *KV_HEADS) if type(value := held.get(n)) is int}
    return {n: max(1, count // ranks) for n, count in counts.items() if n in KV_HEADS or count == heads}
