"""Which weights ``tp`` cuts, and where: read off the anatomy's rules, held against heads and widths.

A container is a module inside a block that takes the residual stream in and gives its part of it back: attention, or
a feed-forward. Inside, linears are cut by output (columns) and then by input (rows). Where it cannot be told what a
rank would compute in between, columns are gathered, and each rank computes that whole. Where all of a model's blocks
are made of containers and norms, the stream between them is cut by time; otherwise every rank keeps it whole.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.anatomy import Anatomy
from phalanx.errors import WrongUse
from phalanx.parallel.axes import adapters, batchnorm, heads
from phalanx.parallel.axes.heads import HEAD_WIDTHS, Span, attribute, features, part

MIXING_NORMS = (*batchnorm.KINDS, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d)
"""Norms over more than one token's features."""
HALVES = frozenset(["gate_up_proj"])


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
    """What ranks compute between the columns and the rows of one container."""

    name: str
    features: tuple[Span, ...]
    """By rank, its part of the hidden width, or of all heads' widths."""
    heads: tuple[Span, ...] = ()
    """By rank, where they are cut between heads."""
    attributes: dict[str, int] = field(default_factory=dict)
    """What the module must believe of itself for its part to fit."""
    config: dict[str, int] = field(default_factory=dict)
    """Likewise, what its configuration must say."""
    gathered: str = ""
    """Why what columns give is gathered, and computed with whole on every rank, up to the rows."""


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
    sequence_parallel: bool = False
    """Whether the residual stream between containers is cut by time."""


def make_plan(model: nn.Module, anatomy: Anatomy, ranks: int) -> Plan:
    """Cuts for every weight that the anatomy has a rule for and that all of its neighbours allow."""
    plan = Plan()
    closed = True
    for block in anatomy.blocks:
        rules = {n: way for n, way in anatomy.splits.items() if n.startswith(block + ".") and way != "vocabulary"}
        groups = list(_closed_groups(block, rules))
        closed &= bool(groups) and all(name != block for name, _ in groups)
        for name, members in groups:
            _cut_container(plan, model, name, {m: rules[m] for m in members}, ranks)
    if not plan.cuts:
        raise WrongUse(
            f"tp={ranks} finds nothing to cut in {type(model).__name__}: no block has linears with a rule for columns "
            "and for rows. Give rules in Task.anatomy, e.g. Anatomy.of(model, splits={'*.up': 'column', "
            "'*.down': 'row'}), or use fsdp instead of tp."
        )
    plan.sequence_parallel = closed and anatomy.in_line and all(_tokenwise(model, b, plan) for b in anatomy.blocks)
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


def _cut_container(plan: Plan, model: nn.Module, name: str, rules: dict[str, Any], ranks: int) -> None:
    for member, way in rules.items():
        module: Any = model.get_submodule(member)
        if way == "row" and not _plain(module):
            raise WrongUse(
                f"{member} is a {type(module).__name__} with a forward of its own, of which tp={ranks} can compute no "
                "part. Leave its container whole by rules of your own in Task.anatomy, or use fsdp instead of tp."
            )
    attends = heads.attends([member.rpartition(".")[2] for member in rules])
    if not attends:
        _check_sizes(model, name, rules, ranks)
    width = attribute(model.get_submodule(name), HEAD_WIDTHS) if attends else None
    count = _head_count(model, rules, width) if width else None
    reason = _why_gathered(model, name, rules, attends, width, count, ranks)
    if not reason and count is not None and count % ranks:
        raise WrongUse(
            f"{name} has {count} heads, which do not divide by tp={ranks}. "
            f"Use a tp that divides {count}, such as tp={heads.divisor(count, ranks)}."
        )
    spans = {m: _spans(model, m, way, None if reason else width, count, ranks) for m, way in rules.items()}
    for member, way in rules.items():
        module = model.get_submodule(member)
        columns = way == "column"
        transposed = not isinstance(module, nn.Linear)  # as of Hugging Face's Conv1D: [in, out]
        plan.cuts[f"{member}.weight"] = Cut(int(columns == transposed), tuple(spans[member]))
        cuts, parts = adapters.cut_beside(member, module, columns, spans[member])
        plan.cuts |= {weight: Cut(dim, tuple(own)) for weight, (dim, own) in cuts.items()}
        plan.partial |= set(parts)
        if columns:
            plan.columns[member] = name
            if module.bias is not None:
                plan.cuts[f"{member}.bias"] = Cut(0, tuple(spans[member]))
        else:
            plan.rows.append(member)
    row = next(member for member, way in rules.items() if way == "row")
    plan.containers[name] = Container(name, tuple(own[0] for own in spans[row]), gathered=reason)
    if count is not None and not reason:
        _cut_by_heads(plan, model, name, count, ranks)


def _cut_by_heads(plan: Plan, model: nn.Module, name: str, count: int, ranks: int) -> None:
    """What attention itself has by head, and what it believes of its heads."""
    container, own = model.get_submodule(name), plan.containers[name]
    for weight, _ in _by_head(container, count):
        plan.cuts[f"{name}.{weight}"] = Cut(0, tuple((part(count, ranks, r),) for r in range(ranks)))
    plan.containers[name] = Container(
        name, own.features, tuple(part(count, ranks, r) for r in range(ranks)), heads.beliefs(container, count, ranks),
        heads.config_beliefs(container, count, ranks),
    )  # fmt: skip


def _by_head(container: nn.Module, count: int | None) -> list[tuple[str, nn.Parameter]]:
    """Attention's own weights with a number for each head, as GPT-OSS has its sinks."""
    return [(n, w) for n, w in container.named_parameters(recurse=False) if tuple(w.shape) == (count,)]


def _why_gathered(
    model: nn.Module, name: str, rules: dict[str, Any], attends: bool, width: int | None, count: int | None, ranks: int
) -> str:
    """Why a rank cannot compute its part between a container's columns and rows; empty if it can."""
    container = model.get_submodule(name)
    if attends and (width is None or count is None):
        return f"{name} does not say how wide its heads are (an attribute head_dim would)"
    if width and count:
        columns = {m: features(model.get_submodule(m), out=True) for m, way in rules.items() if way == "column"}
        reasons = [heads.unclear(member, size, width, count, ranks) for member, size in columns.items()]
        if any(reasons):
            return next(filter(None, reasons))
    known = {f"{member}.{kind}" for member in rules for kind in ("weight", "bias")}
    known |= {f"{name}.{own}" for own, _ in _by_head(container, count)}
    known |= {weight for member in rules for weight in adapters.weights(member, model.get_submodule(member))}
    widths = {features(model.get_submodule(member), out=True) for member, way in rules.items() if way == "row"}
    for full, weight in container.named_parameters(prefix=name):
        on_stream = _is_norm(model, full, weight) and weight.shape[0] in widths
        per_head = weight.ndim == 1 and weight.shape[0] == width
        if full not in known and weight.requires_grad and not per_head and not on_stream:
            return f"{full} belongs to no head or feature in particular"
    return ""


def _spans(
    model: nn.Module, member: str, way: str, width: int | None, count: int | None, ranks: int
) -> list[tuple[Span, ...]]:
    """By rank, the outputs of a column, or the inputs of a row; between heads where they have a ``width``."""
    size = features(model.get_submodule(member), out=way == "column")
    if width and count and way == "column":
        return heads.head_spans(member, size, width, count, ranks)
    if width:
        return [(part(size // width, ranks, r, 0, width),) for r in range(ranks)]
    if member.rpartition(".")[2] in HALVES:
        half = size // 2
        return [(part(half, ranks, r), part(half, ranks, r, half)) for r in range(ranks)]
    return [(part(size, ranks, r),) for r in range(ranks)]


def _plain(module: nn.Module) -> bool:
    """Whether it computes what a linear does: ``x @ weight + bias``. Others are tried with small numbers."""
    if type(module).forward is nn.Linear.forward or type(module).__name__ == "Conv1D" or adapters.beside(module):
        return True
    if not isinstance(module, nn.Linear) or len(list(module.parameters())) > 2 or list(module.buffers()):
        return False
    weight, bias, x = torch.rand(3, 2), torch.rand(3), torch.rand(1, 4, 2)
    small = {id(module.weight): nn.Parameter(weight), id(module.bias): nn.Parameter(bias)}
    if module.bias is None:
        bias = torch.zeros(3)
        small.pop(id(None))
    try:
        with torch.no_grad():
            return torch.allclose(copy.deepcopy(module, small)(x), F.linear(x, weight, bias))
    except Exception:  # whatever it needs, it is no plain linear
        return False


def _check_sizes(model: nn.Module, name: str, rules: dict[str, Any], ranks: int) -> None:
    """In a feed-forward, what columns give must be what the rows take, feature by feature."""
    sizes = {member: features(model.get_submodule(member), out=way == "column") for member, way in rules.items()}
    taken = {sizes[member] for member, way in rules.items() if way == "row"}
    for member, size in sizes.items():
        given = size // 2 if member.rpartition(".")[2] in HALVES else size
        if given not in taken:
            raise WrongUse(
                f"{member} gives {size} features and the rows of {name} take {sorted(taken)}, so tp={ranks} cannot "
                "tell which belong together. Name a projection of two halves gate_up_proj, or use fsdp instead of tp."
            )


def _head_count(model: nn.Module, rules: dict[str, Any], width: int) -> int:
    """Query heads: from the rows, whose input is all of them."""
    row = next(name for name, way in rules.items() if way == "row")
    return features(model.get_submodule(row), out=False) // width


def _tokenwise(model: nn.Module, block: str, plan: Plan) -> bool:
    """Whether all that a block does outside of its containers, it does to each token by itself."""
    linears = {*plan.columns, *plan.rows}  # with what stands beside them
    for name, module in model.get_submodule(block).named_modules(prefix=block):
        inside = next((c for c in plan.containers if name == c or name.startswith(c + ".")), None)
        own = list(module.parameters(recurse=False))
        if not own or f"{name}.weight" in plan.cuts or name.rpartition(".")[0] in linears:
            continue
        norm = "norm" in type(module).__name__.lower() and not isinstance(module, MIXING_NORMS)
        if inside is not None and plan.containers[inside].gathered:
            continue
        if inside is None:
            if not norm or any(p.ndim != 1 for p in own):
                return False
        else:
            divided = plan.containers[inside].heads
            width = attribute(model.get_submodule(inside), HEAD_WIDTHS) if divided else None
            if not norm or any(p.shape[-1] != width for p in own):
                return False
    return True


def _find_partial(plan: Plan, model: nn.Module, anatomy: Anatomy) -> None:
    for block in anatomy.blocks:
        for name, weight in model.get_submodule(block).named_parameters(prefix=block):
            if name in plan.cuts:
                continue
            inside = next((c for c in plan.containers.values() if name.startswith(c.name + ".")), None)
            if inside is not None and inside.gathered:
                per_rank = plan.sequence_parallel and name.rpartition(".")[0] in plan.rows
            else:
                width = attribute(model.get_submodule(inside.name), HEAD_WIDTHS) if inside and inside.heads else None
                per_rank = plan.sequence_parallel or (weight.ndim == 1 and weight.shape[0] == width)
            if per_rank:
                plan.partial.add(name)


def gather_inside(plan: Plan, name: str, reason: str) -> None:
    """From now on have a container's columns gathered, and all between them and its rows computed on every rank."""
    plan.containers[name] = Container(name, plan.containers[name].features, gathered=reason)
    within = {weight for weight in plan.partial if weight.startswith(name + ".")}
    linears = {*plan.columns, *plan.rows}
    plan.partial -= {w for w in within if w.rpartition(".")[0] not in plan.rows and adapters.owner(w) not in linears}


def _is_norm(model: nn.Module, name: str, weight: Tensor) -> bool:
    return "norm" in type(model.get_submodule(name.rpartition(".")[0])).__name__.lower() and weight.ndim == 1


def _cut_vocabulary(plan: Plan, model: nn.Module, anatomy: Anatomy, ranks: int) -> None:
    """Embeddings and heads, each with all that share their weight or not at all."""
    ruled = [
        name
        for name, way in anatomy.splits.items()
        if way == "vocabulary" and not any(name.startswith(block + ".") for block in anatomy.blocks)
    ]
    able = {name for name in ruled if _cuts_by_vocabulary(model, name)}
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
                spans = tuple((part(module.weight.shape[0], ranks, r),) for r in range(ranks))
                plan.cuts[weight] = Cut(0, spans)
                if getattr(module, "bias", None) is not None:
                    plan.cuts[anatomy.tied.get(f"{owner}.bias", f"{owner}.bias")] = Cut(0, spans)


def _cuts_by_vocabulary(model: nn.Module, name: str) -> bool:
    """Whether a module is called, and computes what an embedding or a linear does."""
    module, parent = model.get_submodule(name), model.get_submodule(name.rpartition(".")[0])
    if isinstance(parent, nn.MultiheadAttention):  # it takes its projection's weight, and never calls it
        return False
    if isinstance(module, nn.Embedding):
        usual = type(module).forward is nn.Embedding.forward
        return usual and module.max_norm is None and not module.scale_grad_by_freq
    return isinstance(module, nn.Linear) and (_plain(module) or type(module).__name__ == "Head")
