"""Keras 3 on torch, spread unmodified: its variables are led to the weights as ranks hold them.

Keras registers a layer's weights with torch, but computes with its own references to them, names them by counters that
go on from model to model, and is told at each call whether it trains. keras is never imported here; a model that is one
of its brings it along.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from phalanx.errors import WrongUse


def imported() -> bool:
    """Whether a model may be made of Keras' layers."""
    return "keras" in sys.modules


def build(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A model with the names and the seeds that the first one got, which trains when torch says so."""
    keras = sys.modules.get("keras")
    if keras is not None and hasattr(keras, "utils"):
        policy = keras.config.dtype_policy()
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(seed & 0xFFFFFFFF)
        keras.config.set_dtype_policy(policy)
    model = make()
    outermost: list[Any] = []
    for layer in layers(model) if isinstance(model, nn.Module) else ():
        if not any(layer is inner for outer in outermost for inner in outer.modules()):
            outermost.append(layer)
            layer.__class__ = _training_as_torch_says(type(layer))
    return model


def _training_as_torch_says(kind: Any) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return kind.__call__(self, *args, **{"training": self.training} | kwargs)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def layers(model: nn.Module) -> list[Any]:
    """The Keras layers that torch knows of."""
    kind = getattr(sys.modules.get("keras"), "Layer", ())
    return [module for module in model.modules() if isinstance(module, kind)]


def check_built(model: nn.Module) -> None:
    """Refuse layers that make their weights when they are first called."""
    unbuilt = next((layer for layer in layers(model) if not layer.built), None)
    if unbuilt is not None:
        raise WrongUse(
            f"{unbuilt.name} ({type(unbuilt).__name__}) has no weights before its first call, and cannot be spread. "
            "Begin the model with a keras.Input, or build it in Task.model: model.build((None, width))."
        )


def lead(model: nn.Module) -> None:
    """Have variables look their weights up where torch registered them, since these are replaced there."""
    places = {
        id(weight): (module, name)
        for module in model.modules()
        for name, weight in module.named_parameters(recurse=False, remove_duplicate=False)
    }
    for variable in {id(v): v for layer in layers(model) for v in layer.variables}.values():
        value = vars(variable).get("_value")
        if id(value) not in places:
            continue
        vars(variable).pop("_value")
        variable.phalanx_place = places[id(value)]
        variable.__class__ = _led(type(variable))


def _led(kind: Any) -> type:
    """A class of variables whose value is what their place holds."""

    def value(variable: Any) -> Tensor:
        module, name = variable.phalanx_place
        return getattr(module, name)

    def assign(variable: Any, new: Any) -> None:
        if value(variable).is_floating_point():
            raise WrongUse(
                f"{variable.path} is changed by the model itself, and each rank would change it by its own samples. "
                "Use a layer without running statistics, such as LayerNormalization or GroupNormalization."
            )
        plain(variable, new)

    plain: Callable[[Any, Any], None] = kind._direct_assign
    return type(kind.__name__, (kind,), {"_value": property(value), "_direct_assign": assign})
