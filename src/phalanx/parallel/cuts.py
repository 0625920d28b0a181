"""Which weights ``tp`` cuts, and where: read off the anatomy's rules, held against heads and widths.

A container is a module inside a block that takes the residual stream in and gives its part of it back: attention, or
a feed-forward. Inside, linears are cut by output (columns) and then by input (rows). Where all of a model's blocks are
made of such containers and norms, the stream between them is cut by time; otherwise every rank keeps it whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.anatomy import Anatomy
from phalanx.errors import WrongUse
from phalanx.parallel import batchnorm
from phalanx.parallel.differentiable import run

Span = tuple[int, int]
MIXING_NORMS = (*batchnorm.KINDS, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d)
"""Norms over more than one token's features."""
HEAD_WIDTHS = ("head_dim", "head_width", "head_size", "attention_head_size", "d_head")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
QUERIES = frozenset(["q_proj", "query", "wq", "q"])
KEYS = frozenset(["k_proj", "v_proj", "key", "value", "wk", "wv", "k", "v"])
FUSED = frozenset(["qkv_proj", "qkv", "c_attn", "in_proj", "Wqkv"])
"""Queries of all heads, then keys, then values."""
BY_HEAD = frozenset(["query_key_value"])
"""Query, key and value of one head, then of the next."""
HALVES = frozenset(["gate_up_proj"])
COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "split_size")
"""Attributes of attention modules that say how much of it there is."""


@dataclass(frozen=True)
class Cut:
    """How one dim of a weight is divided: by rank, the spans of it that the rank holds."""

    dim: int
    spans: tuple[tuple[Span, ...], ...]
    axis: str = "tp"
    """The axis whose ranks it is divided between."""

    def shape(self, whole: torch.Size, rank: int) -> torch.Size:
        size = sum(stop - start for start, stop in self.spans[rank])
        return torch.Size([size if dim == self.dim else n for dim, n in enumerate(whole)])

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's part of a whole weight."""
        return torch.cat([whole.narrow(self.dim, a, b - a) for a, b in self.spans[rank]], self.dim)

    def put(self, part: Tensor, whole: Tensor, rank: int) -> None:
        """Lay a rank's part where it belongs."""
        offset = 0
        for start, stop in self.spans[rank]:
            whole.narrow(self.dim, start, stop - start).copy_(part.narrow(self.dim, offset, stop - start))
            offset += stop - start

    def sharers(self, rank: int) -> list[int]:
        """The ranks that hold the same part, as of keys with fewer heads than ranks."""
        return [other for other, spans in enumerate(self.spans) if spans == self.spans[rank]]


@dataclass(frozen=True)
class Container:
    """What a rank computes between the columns and the rows of one container."""

    name: str
    features: Span
    """Its part of the hidden width, or of all heads' widths."""
    heads: Span | None = None
    attributes: dict[str, int] = field(default_factory=dict)
    """What the module must believe of itself for its part to fit."""


@dataclass
class Plan:
    """Cuts by weight, and what each module has to do for them."""

    cuts: dict[str, Cut] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)
    """Weights that every rank keeps whole and gets a part of the gradient for."""
    columns: dict[str, str] = field(default_factory=dict)
    """Linears cut by output, each with its container."""
    rows: list[str] = field(default_factory=list)
    containers: dict[str, Container] = field(default_factory=dict)
    vocabulary: list[str] = field(default_factory=list)
    by_time: bool = False
    """Whether the residual stream between containers is cut by time."""


def make_plan(model: nn.Module, anatomy: Anatomy, ranks: int, rank: int) -> Plan:
    """Cuts for every weight that the anatomy has a rule for and that all of its neighbours allow."""
    plan = Plan()
    closed = True
    for block in anatomy.blocks:
        rules = {n: way for n, way in anatomy.splits.items() if n.startswith(block + ".") and way != "vocabulary"}
        groups = list(_closed_groups(block, rules))
        closed &= bool(groups) and all(name != block for name, _ in groups)
        for name, members in groups:
            _cut_container(plan, model, name, {m: rules[m] for m in members}, ranks, rank)
    if not plan.cuts:
        raise WrongUse(
            f"tp={ranks} finds nothing to cut in {type(model).__name__}: no block has linears with a rule for columns "
            "and for rows. Give rules in Task.anatomy, e.g. Anatomy.of(model, splits={'*.up': 'column', "
            "'*.down': 'row'}), or use fsdp instead of tp."
        )
    plan.by_time = closed and bool(anatomy.cuts) and all(_tokenwise(model, b, plan) for b in anatomy.blocks)
    _find_partial(plan, model, anatomy)
    _cut_vocabulary(plan, model, anatomy, ranks)
    return plan


def _closed_groups(block: str, rules: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """The smallest modules in a block, or the block, that hold both columns and rows, each with its linears."""
    groups: dict[str, list[str]] = {}
    for name in rules:
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    while groups:
        for name in sorted(groups, key=lambda name: -name.count(".")):
            members = groups.pop(name)
            if {rules[member] for member in members} == {"column", "row"}:
                yield name, members
            elif name != block:  # half a pair: its other half may stand beside it
                groups.setdefault(name.rpartition(".")[0], []).extend(members)
            break


def _cut_container(plan: Plan, model: nn.Module, name: str, rules: dict[str, Any], ranks: int, rank: int) -> None:
    container = model.get_submodule(name)
    last = {member: member.rpartition(".")[2] for member in rules}
    width = _attribute(container, HEAD_WIDTHS)
    attends = bool(set(last.values()) & (QUERIES | KEYS | FUSED | BY_HEAD))
    if attends and width is None:
        raise WrongUse(
            f"tp={ranks} must cut {name} between heads, and the module does not say how wide they are. "
            f"Give it an attribute head_dim, or leave it whole by rules of your own in Task.anatomy."
        )
    heads = _head_count(model, rules, width) if attends and width else None
    if not attends:
        _check_sizes(model, name, rules, ranks)
    if heads is not None and heads % ranks:
        raise WrongUse(
            f"{name} has {heads} heads, which do not divide by tp={ranks}. "
            f"Use a tp that divides {heads}, such as tp={_divisor(heads, ranks)}."
        )
    for member, way in rules.items():
        module: Any = model.get_submodule(member)
        if way == "row" and not _plain(module):
            raise WrongUse(
                f"{member} is a {type(module).__name__} with a forward of its own, of which tp={ranks} can compute no "
                "part. Leave its container whole by rules of your own in Task.anatomy, or use fsdp instead of tp."
            )
        transposed = not isinstance(module, nn.Linear)  # as of Hugging Face's Conv1D: [in, out]
        columns = way == "column"
        dim = int(columns == transposed)
        size = int(module.weight.shape[dim])
        if attends and columns:
            assert width is not None
            assert heads is not None
            spans = _head_spans(container, member, size, width, heads, ranks)
        elif last[member] in HALVES:
            half = size // 2
            spans = [(_run(half, ranks, r), _run(half, ranks, r, half)) for r in range(ranks)]
        elif attends:
            assert width is not None
            spans = [(_run(size // width, ranks, r, 0, width),) for r in range(ranks)]
        else:
            spans = [(_run(size, ranks, r),) for r in range(ranks)]
        plan.cuts[f"{member}.weight"] = Cut(dim, tuple(spans))
        if columns:
            plan.columns[member] = name
            if module.bias is not None:
                plan.cuts[f"{member}.bias"] = Cut(0, tuple(spans))
        else:
            plan.rows.append(member)
            features = spans[rank][0]
    plan.containers[name] = Container(
        name,
        features,
        None if heads is None else _run(heads, ranks, rank),
        {} if heads is None else _beliefs(container, heads, ranks),
    )


def _plain(module: nn.Module) -> bool:
    """Whether it computes what a linear does: nothing but ``x @ weight + bias``."""
    return type(module).forward is nn.Linear.forward or type(module).__name__ == "Conv1D"


def _check_sizes(model: nn.Module, name: str, rules: dict[str, Any], ranks: int) -> None:
    """In a feed-forward, what columns give must be what the rows take, feature by feature."""
    sizes = {member: _features(model.get_submodule(member), out=way == "column") for member, way in rules.items()}
    taken = {sizes[member] for member, way in rules.items() if way == "row"}
    for member, size in sizes.items():
        given = size // 2 if member.rpartition(".")[2] in HALVES else size
        if given not in taken:
            raise WrongUse(
                f"{member} gives {size} features and the rows of {name} take {sorted(taken)}, so tp={ranks} cannot "
                "tell which belong together. Name a projection of two halves gate_up_proj, or use fsdp instead of tp."
            )


def _features(module: Any, out: bool) -> int:
    return int(module.weight.shape[(not out) == isinstance(module, nn.Linear)])


def _run(total: int, ranks: int, rank: int, offset: int = 0, width: int = 1) -> Span:
    start, stop = run(total, ranks, rank)
    return offset + start * width, offset + stop * width


def _head_count(model: nn.Module, rules: dict[str, Any], width: int) -> int:
    """Query heads: from the rows, whose input is all of them."""
    row = next(name for name, way in rules.items() if way == "row")
    return _features(model.get_submodule(row), out=False) // width


def _head_spans(
    container: nn.Module, name: str, size: int, width: int, heads: int, ranks: int
) -> list[tuple[Span, ...]]:
    """The outputs of a projection that belong to each rank's heads."""
    last = name.rpartition(".")[2]
    if last in BY_HEAD and size != 3 * heads * width:
        raise WrongUse(
            f"{name} gives {size} features, not query, key and value of {heads} heads of {width}, "
            f"so tp={ranks} cannot tell whose they are. Use fsdp instead of tp."
        )
    if last in BY_HEAD:
        return [(_run(heads, ranks, r, 0, size // heads),) for r in range(ranks)]
    if last in FUSED:
        keys = (size // width - heads) // 2
        starts = [0, heads * width, (heads + keys) * width]
        parts = [
            _spans_of_heads(name, count, width, ranks, start)
            for count, start in zip((heads, keys, keys), starts, strict=True)
        ]
        return [tuple(part[r] for part in parts) for r in range(ranks)]
    return [(span,) for span in _spans_of_heads(name, size // width, width, ranks, 0)]


def _spans_of_heads(name: str, heads: int, width: int, ranks: int, offset: int) -> list[Span]:
    """Heads dealt to ranks; where there are fewer, several ranks hold the same one."""
    if heads % ranks == 0:
        return [_run(heads, ranks, r, offset, width) for r in range(ranks)]
    if ranks % heads == 0:
        return [(offset + r * heads // ranks * width, offset + (r * heads // ranks + 1) * width) for r in range(ranks)]
    raise WrongUse(
        f"{name} has {heads} key-value heads and tp={ranks}: neither divides the other. "
        f"Use a tp that divides {heads}, such as tp={_divisor(heads, ranks)}."
    )


def _divisor(number: int, below: int) -> int:
    return max(n for n in range(1, below + 1) if number % n == 0)


def _attribute(module: nn.Module, names: Sequence[str]) -> int | None:
    for inner in module.modules():
        for name in names:
            value = getattr(inner, name, None)
            if isinstance(value, int):
                return value
    return None


def _beliefs(container: nn.Module, heads: int, ranks: int) -> dict[str, int]:
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


def _tokenwise(model: nn.Module, block: str, plan: Plan) -> bool:
    """Whether all that a block does outside of its containers, it does to each token by itself."""
    for name, module in model.get_submodule(block).named_modules(prefix=block):
        inside = next((c for c in plan.containers if name == c or name.startswith(c + ".")), None)
        own = list(module.parameters(recurse=False))
        if not own or f"{name}.weight" in plan.cuts:
            continue
        norm = "norm" in type(module).__name__.lower() and not isinstance(module, MIXING_NORMS)
        if inside is None:
            if not norm or any(p.ndim != 1 for p in own):
                return False
        else:
            heads = plan.containers[inside].heads
            width = _attribute(model.get_submodule(inside), HEAD_WIDTHS) if heads else None
            if not norm or any(p.shape[-1] != width for p in own):
                return False
    return True


def _find_partial(plan: Plan, model: nn.Module, anatomy: Anatomy) -> None:
    for block in anatomy.blocks:
        for name, weight in model.get_submodule(block).named_parameters(prefix=block):
            if name in plan.cuts:
                continue
            inside = next((c for c in plan.containers.values() if name.startswith(c.name + ".")), None)
            per_head = (
                inside is not None
                and inside.heads is not None
                and weight.ndim == 1
                and weight.shape[0] == _attribute(model.get_submodule(inside.name), HEAD_WIDTHS)
            )
            if plan.by_time or per_head:
                plan.partial.add(name)
            elif inside is not None and weight.requires_grad and not _on_stream(plan, model, name, weight):
                raise WrongUse(
                    f"{name} is inside {inside.name}, whose features are divided, and tp cannot tell which ranks' "
                    "gradients of it add up. Leave that container whole by rules of your own in Task.anatomy, or use "
                    "fsdp instead of tp."
                )


def _on_stream(plan: Plan, model: nn.Module, name: str, weight: Tensor) -> bool:
    """Whether a weight of a container is used where the stream is whole: a row's bias, or a norm as wide as that."""
    owner, _, attribute = name.rpartition(".")
    if owner in plan.rows and attribute == "bias":
        return True
    widths = {_features(model.get_submodule(row), out=True) for row in plan.rows}
    norm = "norm" in type(model.get_submodule(owner)).__name__.lower()
    return norm and weight.ndim == 1 and weight.shape[0] in widths  # over divided features it would not fit


def _cut_vocabulary(plan: Plan, model: nn.Module, anatomy: Anatomy, ranks: int) -> None:
    """Embeddings and heads, each with all that share their weight or not at all."""
    ruled = [
        name
        for name, way in anatomy.splits.items()
        if way == "vocabulary" and not any(name.startswith(block + ".") for block in anatomy.blocks)
    ]
    able = {name for name in ruled if _cuts_by_vocabulary(model.get_submodule(name))}
    places: dict[str, list[str]] = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        owner, _, attribute = name.rpartition(".")
        if attribute == "weight":
            places.setdefault(anatomy.tied.get(name, name), []).append(owner)
    for weight, owners in places.items():
        if all(owner in able for owner in owners):
            plan.vocabulary += owners
            for owner in owners:
                module: Any = model.get_submodule(owner)
                spans = tuple((_run(module.weight.shape[0], ranks, r),) for r in range(ranks))
                plan.cuts[weight] = Cut(0, spans)
                if getattr(module, "bias", None) is not None:
                    plan.cuts[anatomy.tied.get(f"{owner}.bias", f"{owner}.bias")] = Cut(0, spans)


def _cuts_by_vocabulary(module: nn.Module) -> bool:
    if isinstance(module, nn.Embedding):
        usual = type(module).forward is nn.Embedding.forward
        return usual and module.max_norm is None and not module.scale_grad_by_freq
    return isinstance(module, nn.Linear) and (_plain(module) or type(module).__name__ == "Head")
