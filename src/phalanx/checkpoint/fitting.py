"""Whether a checkpoint is one of this model, and of an optimizer that can go on with what it keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import optim

from phalanx.checkpoint.manifest import Damaged, Held, Manifest
from phalanx.checkpoint.owed import fits
from phalanx.checkpoint.sites import common
from phalanx.checkpoint.state import State
from phalanx.errors import WrongUse, closest
from phalanx.parallel.weights.weight import Weight


def check_fits(state: State, manifest: Manifest) -> None:
    """Before anything is overwritten: is this the model that was saved? Refuses another's."""
    saved, spread = manifest.weights(), state.spread
    model = {name: tuple(shape) for name, shape in state.holding.shapes.items()}
    model |= {name: tuple(tensor.shape) for name, tensor in spread.whole.replicated()}
    model = {name: shape for name, shape in model.items() if math.prod(shape)}  # what is empty is not saved
    advice = "It is a checkpoint of another model. Start with the settings it was made with, or in another folder."
    for name, shape in model.items():
        if name not in saved:
            raise WrongUse(f"the checkpoint has no {name}; {closest(name, saved)} {advice}")
        if saved[name].shape != shape:
            raise WrongUse(f"{name} has shape {saved[name].shape} in the checkpoint and {shape} here. {advice}")
    for name in saved:
        if name not in model:
            raise WrongUse(f"the checkpoint holds {name}, which the model does not have. {advice}")
    for name, dtype, _ in spread.whole.description():
        if name in saved and not _alike(then := getattr(torch, saved[name].dtype), dtype):
            raise WrongUse(f"{name} is {_named(then)} in the checkpoint and {_named(dtype)} here. {advice}")
    for name, held in manifest.tensors.items():
        _check_kept(state, name, held, saved)


def _alike(then: torch.dtype, now: torch.dtype) -> bool:
    """Whether a tensor of one dtype can go on in another: real numbers may, in another precision."""
    return then == now or (then.is_floating_point and now.is_floating_point)


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_kept(state: State, name: str, held: Held, saved: Mapping[str, Held]) -> None:
    """Refuse what this optimizer could not keep of a weight."""
    kind, key, owner = [*common(name).split("/", 2), "", ""][:3]
    of_weight = kind in ("optimizer", "callbacks", "outer") and owner in saved
    _check_dtype(state, name, kind, owner, held)
    _check_width(state, kind, key, owner, held)
    if kind == "model" or fits(name, held.shape, saved) or held.shape == (saved[owner].shape if of_weight else ()):
        return
    if not of_weight or kind != "optimizer":
        raise Damaged("a checkpoint", f"has {name} with shape {held.shape}, which nothing keeps")
    weight = state.spread.weights.get(owner)
    if weight is not None and not weight.whole_state:
        raise WrongUse(
            f"the checkpoint's optimizer keeps {key} of {owner} in a shape of its own, {held.shape}, and that of "
            "this task updates each element by itself. Go on with the optimizer that it was saved with, or begin "
            "a new run from its weights with --init-from."
        )


def _check_dtype(state: State, name: str, kind: str, owner: str, held: Held) -> None:
    """Refuse whole numbers where torch's optimizers, an outer optimizer and what is owed keep real ones."""
    weight, dtype = state.spread.weights.get(owner), getattr(torch, held.dtype)
    if kind in ("optimizer", "counters") and weight is not None:
        real = weight.shard.is_floating_point() and _is_torchs(_updating(state.optimizer, weight))
    else:
        real = kind in ("outer", "comm")
    if real and not dtype.is_floating_point:
        raise Damaged("a checkpoint", f"has {name} as {held.dtype}, and that is never of whole numbers")


def _check_width(state: State, kind: str, key: str, owner: str, held: Held) -> None:
    """Refuse narrow moments where one of torch's optimizers is to go on, which keeps them as wide as the weight."""
    weight = state.spread.weights.get(owner)
    if kind != "optimizer" or weight is None:
        return
    updating = _updating(state.optimizer, weight)
    if _is_torchs(updating) and getattr(torch, held.dtype).itemsize < weight.shard.dtype.itemsize:
        raise WrongUse(
            f"the checkpoint's optimizer keeps {key} of {owner} in {held.dtype}, and "
            f"{type(updating).__name__} keeps it as wide as the weight. Go on with the moments that it was "
            "saved with, or begin a new run from its weights with --init-from."
        )


def _updating(optimizer: optim.Optimizer, weight: Weight) -> optim.Optimizer:
    """The one that updates a weight, where several are as one."""
    for part in getattr(optimizer, "named", {}).values():
        if any(weight.optimized is each for group in part.param_groups for each in group["params"]):
            return part
    return optimizer


def _is_torchs(optimizer: optim.Optimizer) -> bool:
    """One of torch's own, or made of one."""
    kinds = type(optimizer).__mro__
    return any(kind.__module__.startswith("torch.optim.") and kind is not optim.Optimizer for kind in kinds)
