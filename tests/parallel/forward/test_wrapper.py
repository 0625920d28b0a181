"""Layers around a module's forward: in order, printed, replaced in one place."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import phalanx
from phalanx.parallel.forward.wrapper import Around, Forward, Instead, Layer, wrap, wrapper


class Double(nn.Module):
    def forward(self, x: Tensor, plus: float = 0.0) -> Tensor:
        return 2 * x + plus


class Noted(Layer):
    """Notes when it is entered and left."""

    def __init__(self, title: str, notes: list[str]) -> None:
        self.title, self.notes = title, notes

    def __call__(self, rest: Forward, *args: Any, **kwargs: Any) -> Any:
        self.notes.append(f"into {self.title}")
        output = rest(*args, **kwargs)
        self.notes.append(f"out of {self.title}")
        return output


def test_layers_are_passed_from_the_outermost_to_the_innermost_and_back() -> None:
    notes: list[str] = []
    module = Double()
    wrap(module, Noted("a", notes), Noted("b", notes))
    assert float(module(torch.tensor(3.0), plus=1.0)) == 7
    assert notes == ["into a", "into b", "out of b", "out of a"]


def test_a_forward_prints_its_layers() -> None:
    module = Double()
    wrap(module, Noted("a", []), Noted("b", []))
    assert repr(wrapper(module)) == "a > b > Double.forward"
    assert repr(module.forward) == "<bound method Double.forward of a > b > Double.forward>"
    assert str(inspect.signature(module.forward)).startswith("(x: 'Tensor', plus: 'float' = 0.0)")


def test_a_forward_that_is_no_method_keeps_its_signature() -> None:
    def own(x: Tensor, times: int = 3) -> Tensor:
        return times * x

    module = Double()
    module.forward = own  # type: ignore[assignment]
    wrap(module, Noted("a", []))
    assert str(inspect.signature(module.forward)).startswith("(x: 'Tensor', times: 'int' = 3)")
    assert float(module(torch.tensor(2.0))) == 6


def test_later_layers_go_around_earlier_ones_in_one_wrapper() -> None:
    notes: list[str] = []
    module = Double()
    wrap(module, Noted("inner", notes))
    wrap(module, Noted("outer", notes), Noted("middle", notes))
    module(torch.tensor(1.0))
    assert repr(wrapper(module)) == "outer > middle > inner > Double.forward"
    assert notes[:3] == ["into outer", "into middle", "into inner"]


def test_functions_are_layers() -> None:
    def around(rest: Forward, bound: float, x: Tensor, **kwargs: Any) -> Any:
        return rest(x + bound, **kwargs) * 10

    def instead(bound: float, x: Tensor, plus: float = 0.0) -> Tensor:
        return x - bound - plus

    one, other = Double(), Double()
    wrap(one, Around("shifted", around, 1.0))
    wrap(other, Around("shifted", around, 1.0), Instead("less", instead, 5.0))
    assert float(one(torch.tensor(3.0), plus=1.0)) == 90
    assert float(other(torch.tensor(3.0), plus=1.0)) == -20
    for layer in (Around("shifted", around, 1.0), Instead("less", instead, 5.0)):
        assert layer(one, torch.tensor(3.0)) == layer.over(one)(torch.tensor(3.0))


def test_a_forward_is_replaced_in_one_place() -> None:
    source = Path(phalanx.__file__).parent
    places = [
        f"{path.relative_to(source)}"
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute) and target.attr == "forward"
    ]
    assert places == ["parallel/forward/wrapper.py"]


def test_modules_that_are_alike_are_compiled_once() -> None:
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Double()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).relu()

    torch._dynamo.reset()
    for number in range(3):
        chain = Chain()
        wrap(chain.inner, Around("plus", lambda rest, by, x: rest(x) + by, torch.tensor(float(number))))
        assert float(torch.compile(chain.forward, backend=backend)(torch.tensor(3.0))) == 6 + number
    assert len(compiled) == 1
