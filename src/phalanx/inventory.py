"""What a model weighs: its parts, and their weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import nn

from phalanx.anatomy import Anatomy
from phalanx.words import columns


@dataclass(frozen=True)
class ModelPart:
    """A module of the model, or several alike in a row."""

    name: str
    kind: str
    weights: int
    trainable: int


def numbers(model: nn.Module) -> dict[str, int]:
    """Of weights that are not kept a number an element, as those in 4 bits, how many numbers they stand for."""
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        own: dict[str, int] = getattr(module, "stands_for", {})
        found |= {f"{name}.{weight}" if name else weight: count for weight, count in own.items()}
    return found


def parts(model: nn.Module, anatomy: Anatomy) -> list[ModelPart]:
    """What comes before the blocks, the blocks, what comes after, and what is in none of these; tied weights once."""
    counts = {name: weight.numel() for name, weight in model.named_parameters()}
    counts |= {name: count for name, count in numbers(model).items() if name in counts}
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    found: list[ModelPart] = []
    for names in (*([name] for name in anatomy.before), *_alike(model, anatomy.blocks), *([n] for n in anatomy.after)):
        own = [name for name in counts if any(name == part or name.startswith(f"{part}.") for part in names if part)]
        kind = type(model.get_submodule(names[0])).__name__
        many = f"{len(names)} x {kind}" if len(names) > 1 else kind
        title = f"{names[0]} to {names[-1]}" if len(names) > 1 else names[0]
        total = sum(counts.pop(name) for name in own if name not in trained)
        learned = sum(counts.pop(name) for name in own if name in trained)
        found.append(ModelPart(title or "(the model)", many, total + learned, learned))
    if counts:
        found.append(
            ModelPart(
                "others",
                ", ".join(list(counts)[:2]),
                sum(counts.values()),
                sum(counts[n] for n in counts if n in trained),
            )
        )
    return [part for part in found if part.weights]


def _alike(model: nn.Module, names: Sequence[str]) -> Iterable[list[str]]:
    """Blocks in a row of one kind and size."""

    def look(name: str) -> tuple[str, int]:
        module = model.get_submodule(name)
        return type(module).__name__, sum(weight.numel() for weight in module.parameters())

    return (list(group) for _, group in groupby(names, key=look))


def table(found: Sequence[ModelPart]) -> list[str]:
    """For the screen, a line each and one for all."""
    total = ModelPart("all", "", sum(p.weights for p in found), sum(p.trainable for p in found))
    rows = [("part", "kind", "weights", "trainable")]
    rows += [(p.name, p.kind, f"{p.weights:,}", f"{p.trainable:,}") for p in (*found, total)]
    return columns(rows, right=(2, 3))
