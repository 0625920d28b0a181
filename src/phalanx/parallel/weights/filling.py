"""A model's weights on this rank: described with all places where they are used, then filled one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.anatomy import Anatomy
from phalanx.errors import WrongUse
from phalanx.parallel.axes.cuts import Cut
from phalanx.parallel.axes.elsewhere import AbsentWeight
from phalanx.parallel.forward.calls import shapeless
from phalanx.parallel.torch_private import FakeTensor, has_hooks, install
from phalanx.parallel.weights.blueprint import Blueprint
from phalanx.parallel.weights.boxes import boxes, locate
from phalanx.parallel.weights.holding import Holding
from phalanx.parallel.weights.parts import parts
from phalanx.parallel.weights.storage import Storage
from phalanx.parallel.weights.weight import Weight
from phalanx.trees import leaves, mapped

Saved = Callable[[str, Cut | None, int], Tensor | None]
"""A rank's part of a weight, by name, from where it is kept; None: it is not, and begins as its constructor says."""


def describe(
    model: nn.Module, anatomy: Anatomy, holding: Holding, storage: Callable[[str], Storage], device: torch.device
) -> dict[str, Weight]:
    """Every weight of this stage in the order of its units, with all places where it is used."""
    places: dict[str, list[tuple[nn.Module, str]]] = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        owner, _, attribute = name.rpartition(".")
        places.setdefault(anatomy.tied.get(name, name), []).append((model.get_submodule(owner), attribute))
    described = dict(model.named_parameters())
    for name, weight in described.items():
        if has_hooks(weight):
            raise WrongUse(
                f"{name} has a hook on its gradient, which would see a part of it. "
                "Do it in the optimizer, or on the model's output, and leave the hook out."
            )

    for name, weight in described.items():
        if not holding.here(name):  # nothing is kept of what other stages have
            placeholder = AbsentWeight.of(name, shapeless(weight, weight.dtype), device)
            for module, attribute in places[name]:
                install(module, attribute, placeholder)
    found = {
        name: Weight(name, described[name], holding.shape(name), places[name], storage(name))
        for unit in anatomy.units
        for name in unit.weights
        if holding.placement.weights[name].policy.axes and holding.here(name)
    }
    for name, one in found.items():
        one.divided = not {"tp", "pp"}.isdisjoint(holding.placement.summed_over(name))
    return found


def fill(
    weights: Mapping[str, Weight],
    blueprint: Blueprint,
    saved: Saved | None,
    holding: Holding,
    device: torch.device,
    wide: bool,
) -> None:
    """Fill this rank's rows of each weight, one at a time; weights that stay whole are gathered from them later."""
    described = dict(blueprint.model.named_parameters())
    for name, weight in weights.items():
        described_one, cut, index = described.pop(name), holding.cut(name), holding.index(name)
        weight.make_room()
        locate(weight, cut, index, holding.shapes[name])
        rows = weight.shard.data
        if saved is not None and (found := saved(name, cut, index)) is not None:
            rows.copy_(weight.own_rows(found))
            continue
        places = list(boxes(weight, cut, index, rows))
        drawn = parts(blueprint, described_one, [box for box, _ in places], device)
        for (_, view), part in zip(places, drawn, strict=True):
            view.copy_(part)
    for name, parameter in described.items():  # what every rank keeps, as truth values
        if holding.placement.weights[name].policy.axes:
            continue  # another stage's
        if parameter.requires_grad:
            raise WrongUse(f"{name} is {parameter.dtype}, which is not trained here. Keep its parts as real weights.")
        kept_value = saved(name, None, 0) if saved is not None else None
        value = blueprint.value(parameter, device) if kept_value is None else kept_value.to(device)
        made = nn.Parameter(value, requires_grad=False)
        for module in blueprint.model.modules():
            for attribute, held in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if held is parameter:
                    setattr(module, attribute, made)

    def widened(value: Tensor) -> Tensor:
        return value.double() if wide and value.is_floating_point() else value

    def real(value: Tensor) -> Tensor:
        return widened(blueprint.value(value, device))

    kept = set(blueprint.model.state_dict(keep_vars=True)) if saved is not None else set()
    for owner, module in blueprint.model.named_modules():
        for name, value in [*module.named_buffers(recurse=False), *_plain_attributes(module)]:
            full = f"{owner}.{name}" if owner else name
            if saved is not None and full in kept and (stored := saved(full, None, 0)) is not None:
                setattr(module, name, widened(stored.to(device)))
            else:
                setattr(module, name, mapped(real, value))
        _refuse_hidden(module, owner)


def _plain_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """Tensors kept as plain attributes, alone or in lists and dicts, which a constructor may have made too."""
    plain = [(name, value) for name, value in vars(module).items() if not name.startswith("_")]
    return [(name, value) for name, value in plain if any(True for _ in leaves(value))]


def _refuse_hidden(module: nn.Module, name: str) -> None:
    for attribute, value in vars(module).items():
        hidden = vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, nn.Module) else ()
        if any(isinstance(inner, FakeTensor) for inner in hidden):
            raise WrongUse(
                f"{name or 'the model'} keeps a tensor inside its attribute {attribute!r}, where it cannot be filled. "
                "Register it with register_buffer, or keep it in a list or dict."
            )
