"""What optimizers and callbacks keep, refused where it cannot be saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from torch import Tensor, optim

from phalanx.errors import WrongUse, closest


def check_names(label: str, tensors: Mapping[str, Tensor], names: Set[str]) -> None:
    """Refuse what a callback keeps of what is no weight and no buffer."""
    for name in sorted(tensors.keys() - names):
        raise WrongUse(
            f"{label}.tensors() has {name!r}, which is no weight of this rank (engine.spread.weights has them), nor a "
            f"buffer of the model (other things go into state_dict()); {closest(name, names)}"
        )


def check_shape(label: str, name: str, tensor: Tensor, like: Tensor) -> None:
    """Refuse what it keeps of a weight in another shape than the shard's, or of a buffer in another than its own."""
    if tensor.shape != like.shape:
        raise WrongUse(
            f"{label}.tensors() has for {name} the shape {tuple(tensor.shape)}, and this rank's part of it has "
            f"{tuple(like.shape)}. Make it like engine.spread.weights[name].shard."
        )


def check_owners(optimizer: optim.Optimizer, weights: Sequence[Tensor]) -> None:
    """Refuse an optimizer that keeps state of something else than weights."""
    known = set(weights)
    for owner in optimizer.state:
        if owner not in known:
            raise WrongUse(
                f"{type(optimizer).__name__} keeps {str(owner)[:40]!r} in its state, which belongs to no "
                "weight and cannot be saved. Keep it with a weight, or as a number in param_groups."
            )


def check_keepable(
    optimizer: optim.Optimizer, name: str, weight: Tensor, key: str, value: Any, whole: bool = False
) -> None:
    """Refuse what an optimizer keeps of a weight where it cannot be saved; of a ``whole`` one, any tensor can be."""
    shaped = isinstance(value, Tensor) and (whole or value.shape == weight.shape or value.numel() == 1)
    if not shaped and not isinstance(value, (int, float, str, bool, type(None))):
        raise WrongUse(
            f"{type(optimizer).__name__} keeps {key!r} of {name} as a {type(value).__name__}"
            f"{f' of shape {tuple(value.shape)}' if isinstance(value, Tensor) else ''}, which cannot be "
            "saved. Keep a tensor of the weight's shape, or a number."
        )
