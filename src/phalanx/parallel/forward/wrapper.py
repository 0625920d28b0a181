"""A module's forward and the layers around it: the one place where a forward is replaced.

What spreading a model adds to a module is a list of layers, outermost first, around the module's own forward. Print a
module's ``forward`` to read what happens in a call of it, in order:

    >>> engine.spread.model.blocks[0].forward
    <bound method Block.forward of enter: sequence over cp, tp > random keys of blocks.0 > probe > Block.forward>
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

Forward = Callable[..., Any]


class Layer(ABC):
    """What is done around the rest of a call: the layers further in, and then the module's own forward."""

    title: str
    """What the layer does, in the list that a wrapper prints."""

    @abstractmethod
    def __call__(self, rest: Forward, *args: Any, **kwargs: Any) -> Any:
        """The call, in which ``rest(*args, **kwargs)`` runs what is further in."""

    def over(self, rest: Forward) -> Forward:
        """This layer and the rest as one function: made once, when a module is wrapped."""
        return partial(self, rest)


class Around(Layer):
    """A function ``(rest, *bound, *args, **kwargs)`` as a layer."""

    def __init__(self, title: str, function: Forward, *bound: Any) -> None:
        self.title, self._function, self._bound = title, function, bound

    def __call__(self, rest: Forward, *args: Any, **kwargs: Any) -> Any:
        return self._function(rest, *self._bound, *args, **kwargs)

    def over(self, rest: Forward) -> Forward:
        return partial(self._function, rest, *self._bound)


class Instead(Layer):
    """A function ``(*bound, *args, **kwargs)`` that computes what the module's own forward would have."""

    def __init__(self, title: str, function: Forward, *bound: Any) -> None:
        self.title, self._run = title, partial(function, *bound)

    def __call__(self, rest: Forward, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def over(self, rest: Forward) -> Forward:
        return self._run


class Wrapper:
    """What stands in a module as its forward."""

    def __init__(self, module: nn.Module, forward: Forward, layers: tuple[Layer, ...]) -> None:
        self.layers, self.forward = layers, forward
        self._own = f"{type(module).__name__}.forward"
        self._run = forward
        for layer in reversed(layers):
            self._run = layer.over(self._run)

    def method(self) -> Forward:
        """The call, with the signature of what is wrapped.

        It is a bound method: of any other object, torch.compile makes a program a module, however alike they are.
        """

        def call(wrapper: Wrapper, *args: Any, **kwargs: Any) -> Any:
            return wrapper._run(*args, **kwargs)

        call.__qualname__ = self._own
        with suppress(TypeError, ValueError):  # of what is written in C
            own = inspect.signature(self.forward)
            first = inspect.Parameter("wrapper", inspect.Parameter.POSITIONAL_ONLY)
            call.__signature__ = own.replace(parameters=[first, *own.parameters.values()])  # type: ignore[attr-defined]
        return MethodType(call, self)

    def __repr__(self) -> str:
        return " > ".join([*(layer.title for layer in self.layers), self._own])


def wrap(module: nn.Module, *layers: Layer, inside: bool = False) -> None:
    """Put layers around a module's forward, outermost first, around those that it has or inside of them."""
    around, forward = wrapper(module), module.forward
    if around is not None:
        layers = (*around.layers, *layers) if inside else (*layers, *around.layers)
        forward = around.forward
    module.forward = Wrapper(module, forward, layers).method()


def wrapper(module: nn.Module) -> Wrapper | None:
    """What stands in a module as its forward, if anything does."""
    found = getattr(module.forward, "__self__", None)
    return found if isinstance(found, Wrapper) else None
