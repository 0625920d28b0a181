"""The Anatomy: what a model consists of, read off any ``nn.Module``.

Everything that must know a model asks here: sharding, recompute and compile units, tensor splits, pipeline cuts.
Each answer comes from the first source that has one: the task's own rules, Hugging Face's plans, detection.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, TypeVar, get_args

from torch import Tensor, nn

from phalanx.errors import WrongUse, closest
from phalanx.words import many

Place = Literal["before", "block", "after", "root", "tied"]
Split = Literal["column", "row", "vocabulary"]
LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Unit:
    """Weights that are gathered and reduced together, and the modules whose forward needs them whole."""

    name: str
    place: Place
    modules: tuple[str, ...]
    weights: tuple[str, ...]


@dataclass(frozen=True)
class Anatomy:
    """A model's repeated blocks and what stands around them, in the order of registration."""

    blocks: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    tied: Mapping[str, str] = field(default_factory=dict)
    """Second names of shared weights, each with the first: ``{"head.weight": "embed.weight"}``."""
    splits: Mapping[str, Split] = field(default_factory=dict)
    """How a module's weight splits over ``tp``: by output (column), by input (row), by vocabulary."""
    cuts: tuple[str, ...] = ()
    """Blocks at which a pipeline stage may begin."""
    experts: tuple[str, ...] = ()
    """Modules that hold weights stacked by expert, which ``ep`` divides."""
    apart: tuple[str, ...] = ()
    """Modules that are models by themselves: the stream through their blocks begins and ends there."""
    units: tuple[Unit, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where blocks, splits and cuts come from: ``task``, ``hugging face`` or ``detection``."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        blocks: str | Iterable[str] | None = None,
        splits: Mapping[str, Split] | None = None,
        cuts: str | Iterable[str] | None = None,
        experts: str | Iterable[str] | None = None,
        apart: str | Iterable[str] = (),
    ) -> Anatomy:
        """Read a model. Rules are patterns over module names: ``blocks="trunk.*"``, ``splits={"*.up": "column"}``."""
        names = [name for name, _ in model.named_modules()]
        sources = {}
        found, sources["blocks"] = _first(
            ("task", () if blocks is None else _matching(names, blocks, "blocks")),
            ("hugging face", _hugging_face_blocks(model)),
            ("detection", _repeated(model)),
        )
        split, sources["splits"] = _first(
            ("task", {} if splits is None else _split_rules(model, names, splits)),
            ("hugging face", _hugging_face_splits(model, names, found)),
            ("detection", _detected_splits(model, found)),
        )
        cut, sources["cuts"] = _first(
            ("task", () if cuts is None else _matching(names, cuts, "cuts")),
            ("detection", _chain(model, found)),
        )
        stacked, sources["experts"] = _first(
            ("task", () if experts is None else _matching(names, experts, "experts")),
            ("detection", _stacked(model)),
        )
        before, after = _around(model, found)
        tied = _tied(model)
        units = _units(model, found, before, after, tied)
        own = _matching(names, apart, "apart") if apart else ()
        return cls(found, before, after, tied, split, cut, stacked, own, units, sources)

    @property
    def in_line(self) -> bool:
        """Whether blocks run one after another: all in one list, or those of each model apart in one."""
        lists = [{name.rpartition(".")[0] for name in self.chain(block)} for block in self.blocks]
        return bool(self.cuts) or (bool(self.apart) and all(len(each) == 1 for each in lists))

    def chain(self, block: str) -> tuple[str, ...]:
        """The blocks that the stream goes through together with this one, in their order."""

        def home(name: str) -> str:
            return next((module for module in self.apart if _inside(name, module)), "")

        return tuple(name for name in self.blocks if home(name) == home(block))

    @property
    def idle_splits(self) -> dict[str, Split]:
        """Splits that no layout makes use of.

        ``tp`` cuts columns and rows inside of blocks that have both, and vocabularies beside such blocks; the last
        linear of a language model gives lazy logits at any layout.
        """
        homes = {name: next((block for block in self.blocks if _inside(name, block)), "") for name in self.splits}
        ways = {block: {way for name, way in self.splits.items() if homes[name] == block} for block in self.blocks}
        paired = {block for block, own in ways.items() if {"column", "row"} <= own}

        def used(name: str, way: Split) -> bool:
            if way != "vocabulary":
                return homes[name] in paired
            return not homes[name] and (bool(paired) or name in self.after)

        return {name: way for name, way in self.splits.items() if not used(name, way)}

    def describe(self) -> str:
        """One line for people."""
        told = {
            "task": "as the task says",
            "hugging face": "as its Hugging Face plan says",
            "detection": "by structure",
        }
        found = told.get(self.sources.get("blocks", ""), "")
        where = f"{many(len(self.blocks), 'block')} {found}".rstrip() if self.blocks else "no repeated blocks"
        tied = f", tied: {', '.join(f'{a} = {b}' for a, b in self.tied.items())}" if self.tied else ""
        sides = {"before": self.before, "after": self.after}
        around = "".join(f", {many(len(names), 'module')} {side}" for side, names in sides.items() if names)
        return f"{where}{around}{tied}"


def _first(*answers: tuple[str, Answer]) -> tuple[Answer, str]:
    """The first answer that is not empty, with its source."""
    for source, answer in answers:
        if answer:
            return answer, source
    return answers[-1][1], "none"


def _outermost(names: Iterable[str]) -> tuple[str, ...]:
    """Those names that are not inside another of them, in order."""
    kept: list[str] = []
    for name in names:
        if not any(_inside(name, other) for other in kept):
            kept.append(name)
    return tuple(kept)


def _inside(name: str, other: str) -> bool:
    return other == "" or name == other or name.startswith(other + ".")


def _matching(names: list[str], patterns: str | Iterable[str], what: str) -> tuple[str, ...]:
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise WrongUse(f"{what}={pattern!r} matches no module of the model; {closest(pattern, names[1:])}")
    return _outermost(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def _split_rules(model: nn.Module, names: list[str], rules: Mapping[str, Split]) -> dict[str, Split]:
    for pattern, way in rules.items():
        _matching(names, pattern, "splits")
        matched = [model.get_submodule(name) for name in names if fnmatchcase(name, pattern)]
        if not any(map(_has_matrix, matched)):
            kinds = ", ".join(sorted({type(module).__name__ for module in matched}))
            raise WrongUse(
                f"splits={{{pattern!r}: {way!r}}} matches no module with a matrix to split ({kinds}). Name a linear or "
                "an embedding."
            )
        if way not in get_args(Split):
            raise WrongUse(f"splits={{{pattern!r}: {way!r}}} is no way to split; {closest(str(way), get_args(Split))}")
    return {name: way for pattern, way in rules.items() for name in names if fnmatchcase(name, pattern)}


def _has_matrix(module: nn.Module) -> bool:
    """Whether its weight is a matrix; a linear may keep it as something else."""
    weight = getattr(module, "weight", None)
    return (isinstance(weight, Tensor) and weight.ndim == 2) or isinstance(module, nn.Linear)


def _repeated(model: nn.Module) -> tuple[str, ...]:
    """Modules of one class that stand in lists: composite ones if there are any, else layers with weights."""
    listed = [
        (f"{name}.{child}" if name else child, module)
        for name, parent in model.named_modules()
        if isinstance(parent, LISTS)
        for child, module in parent.named_children()
    ]
    for kind in ("composite", "list", "layer"):
        members = [(name, type(module)) for name, module in listed if _kind(module) == kind]
        classes = Counter(module for _, module in members)
        found = _outermost(name for name, module in members if classes[module] > 1)
        if found:
            return found
    return ()


def _kind(module: nn.Module) -> str:
    if next(module.parameters(), None) is None:
        return "weightless"
    if isinstance(module, LISTS):
        return "list"
    return "layer" if next(module.children(), None) is None else "composite"


def _hugging_face_blocks(model: nn.Module) -> tuple[str, ...]:
    """The children of the lists that a pipeline plan names, e.g. ``{"layers": (...)}``."""
    plan = getattr(model, "_pp_plan", None) or {}
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and any(name == key or name.endswith("." + key) for key in plan)
    ]
    return tuple(f"{name}.{child}" for name in lists for child, _ in model.get_submodule(name).named_children())


WORDS: Mapping[str, Split] = {
    "colwise": "column",
    "packed_colwise": "column",
    "rowwise": "row",
    "packed_rowwise": "row",
    "colwise_rep": "vocabulary",
    "colwise_gather_output": "vocabulary",
    "embedding_rowwise": "vocabulary",
}


WORDS_IN_BLOCKS: Mapping[str, Split] = {"colwise_gather_output": "column", "rowwise_split_input": "row"}
"""What these mean in a module that has both: a pair, of which the cut decides whether it must be gathered between."""


def _hugging_face_splits(model: nn.Module, names: list[str], blocks: tuple[str, ...]) -> dict[str, Split]:
    plan = getattr(model, "_tp_plan", None) or {}
    said = {name: word for pattern, word in plan.items() for name in names if fnmatchcase(name, pattern)}
    found = {}
    for name, word in said.items():
        beside = {said.get(n) for n in said if n.rpartition(".")[0] == name.rpartition(".")[0]}
        paired = beside >= set(WORDS_IN_BLOCKS) and any(_inside(name, block) for block in blocks)
        words = {**WORDS, **WORDS_IN_BLOCKS} if paired else WORDS
        if word in words:
            found[name] = words[word]
    return found if {"column", "row"} <= set(found.values()) else {}  # some plans gather after every layer


COLUMN = frozenset([
    "q_proj", "k_proj", "v_proj", "qkv_proj", "qkv", "query", "key", "value", "wq", "wk", "wv", "c_attn", "in_proj",
    "query_key_value", "gate_proj", "up_proj", "gate_up_proj", "gate", "up", "w1", "w3", "fc1", "c_fc",
    "dense_h_to_4h", "linear1",
])  # fmt: skip
ROW = frozenset([
    "o_proj", "out_proj", "wo", "proj", "down_proj", "down", "w2", "fc2", "c_proj", "dense", "dense_4h_to_h", "linear2",
])  # fmt: skip


def _of_positions(name: str) -> bool:
    """Whether a module looks up positions: it is small, and models such as CLIP ask its weight how many there are."""
    return "position" in name.rpartition(".")[2]


def _detected_splits(model: nn.Module, blocks: tuple[str, ...]) -> dict[str, Split]:
    """Linears inside blocks by their customary names; an embedding and the layer as wide as its vocabulary."""
    found: dict[str, Split] = {}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if not _has_matrix(module):
            continue
        if any(_inside(name, block) for block in blocks):
            if last in COLUMN:
                found[name] = "column"
            elif last in ROW:
                found[name] = "row"
    embeddings = {name: m for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
    sizes = {m.num_embeddings for name, m in embeddings.items() if not _of_positions(name)}
    for name, module in model.named_modules():
        outside = found and not any(_inside(name, block) for block in blocks) and not _of_positions(name)
        size = getattr(module, "num_embeddings", getattr(module, "out_features", None))
        if outside and isinstance(module, (nn.Embedding, nn.Linear)) and size in sizes:
            found[name] = "vocabulary"
    return found


def _stacked(model: nn.Module) -> tuple[str, ...]:
    """Modules whose own weights all have a first dim of ``num_experts``."""
    found = []
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        count = getattr(module, "num_experts", None)
        if isinstance(count, int) and any(w.ndim == 3 for w in own) and all(w.shape[0] == count for w in own):
            found.append(name)
    return tuple(found)


def _chain(model: nn.Module, blocks: tuple[str, ...]) -> tuple[str, ...]:
    """All blocks, if they stand in one list and so run one after another."""
    parents = {name.rpartition(".")[0] for name in blocks}
    return blocks if len(parents) == 1 else ()


def _around(model: nn.Module, blocks: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The largest modules without a block in them, before the first block and after it."""
    if not blocks:
        return (), ()
    order = [name for name, _ in model.named_modules()]
    free = [name for name in order if not any(_inside(name, b) or _inside(b, name) for b in blocks)]
    first = order.index(blocks[0])
    outer = _outermost(free)
    return tuple(n for n in outer if order.index(n) < first), tuple(n for n in outer if order.index(n) > first)


def _tied(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    tied = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(weight), name) != name:
            tied[name] = first[id(weight)]
    return tied


def _units(
    model: nn.Module,
    blocks: tuple[str, ...],
    before: tuple[str, ...],
    after: tuple[str, ...],
    tied: Mapping[str, str],
) -> tuple[Unit, ...]:
    """Every weight in exactly one unit: its block's, its module's, the root's, or one of its own if it is shared."""
    places: list[tuple[str, Place]] = [
        *((name, "before") for name in before),
        *((name, "block") for name in blocks),
        *((name, "after") for name in after),
        ("", "root"),
    ]

    def home(weight: str) -> str:
        return next(name for name, _ in places if _inside(weight, name))

    homes: dict[str, list[str]] = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        homes.setdefault(tied.get(name, name), []).append(home(name))
    units = []
    for module, place in places:
        weights = tuple(name for name, where in homes.items() if set(where) == {module})
        if weights:
            units.append(Unit(module, place, (module,), weights))
    shared = [(name, tuple(dict.fromkeys(where))) for name, where in homes.items() if len(set(where)) > 1]
    units.extend(Unit(name, "tied", where, (name,)) for name, where in shared)
    rank = {"tied": 0, "root": 0, "before": 1, "block": 2, "after": 3}
    return tuple(sorted(units, key=lambda unit: rank[unit.place]))
