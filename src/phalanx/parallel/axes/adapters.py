"""A product of low rank beside a linear, as LoRA's, cut over ``tp`` together with it.

Such a linear names the two linears of the product in ``low_rank``, narrow and wide, and ``product`` gives all that it
computes but the bias. Beside columns the wide one is cut by output; beside rows the narrow one by input, and what it
adds is a part of the sum over ranks. The other of the two is whole everywhere, and each rank has a part of its
gradient. Where a linear's own weight is kept in few bits, those are cut by rows if a row is whole blocks of them;
otherwise every rank has all, and computes with its part.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from phalanx.errors import WrongUse
from phalanx.parallel.axes.heads import Span

MAGNITUDE = "lora_magnitude_vector"


def beside(module: nn.Module) -> tuple[str, ...]:
    """The two linears of a product beside this one, narrow and wide; mostly there is none."""
    return getattr(module, "low_rank", ())


def weights(name: str, module: nn.Module) -> list[str]:
    """All weights that stand beside a linear's own."""
    own = [f"{name}.{inner}.weight" for inner in beside(module)]
    return [*own, f"{name}.{MAGNITUDE}"] if getattr(module, MAGNITUDE, None) is not None else own


def owner(weight: str) -> str:
    """The linear that a weight stands beside, if it is one of a product's."""
    return weight.rpartition(".")[0].rpartition(".")[0]


def cut_beside(
    name: str, module: nn.Module, columns: bool, spans: list[tuple[Span, ...]]
) -> tuple[dict[str, tuple[int, list[tuple[Span, ...]]]], list[str]]:
    """By weight, the dim it is cut along and its spans; and the weights that are whole, with parts of a gradient."""
    if not beside(module):
        return {}, []
    narrow, wide = (f"{name}.{inner}.weight" for inner in beside(module))
    if columns:
        cuts = {wide: (0, spans)}
        for part, size in getattr(module, "row_sizes", {}).items():  # of its own weight, where that is kept in few bits
            cuts[f"{name}.{part}"] = 0, [tuple((a * size, b * size) for a, b in own) for own in spans]
        if getattr(module, MAGNITUDE, None) is not None:
            cuts[f"{name}.{MAGNITUDE}"] = 0, spans
        return cuts, [narrow]
    if getattr(module, MAGNITUDE, None) is not None:
        raise WrongUse(
            f"{name} is cut by its input, and lora_kind=dora needs the length of whole rows. Leave it out of "
            "lora_targets, use lora_kind=lora or rslora, or fsdp instead of tp."
        )
    return {narrow: (1, spans)}, [wide]


def dropout(module: Any) -> nn.Module | None:
    """What drops the input of a product, if anything does."""
    found = getattr(module, "lora_dropout", None)
    return found if isinstance(found, nn.Dropout) else None
