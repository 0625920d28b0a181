"""What a model weighs: parts that add up, and the arithmetic of ZeRO."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from phalanx.anatomy import Anatomy
from phalanx.inventory import described_memory, memory, parts, share, state_numbers, table, task_state_numbers
from phalanx.layout import Layout
from phalanx.parallel.weights.blueprint import Blueprint
from phalanx.precision import DTYPES
from phalanx.recipes.gpt import GPT
from tests.tasks import Digits


@pytest.mark.parametrize("tied", [False, True])
def test_parts_add_up_and_blocks_are_one_line(tied: bool) -> None:
    task = GPT(tied=tied)
    model = Blueprint(task.model, 0).model
    model.get_submodule("blocks.1").requires_grad_(False)
    found = parts(model, task.anatomy(model))
    assert sum(part.weights for part in found) == sum(weight.numel() for weight in model.parameters())
    assert sum(part.trainable for part in found) == sum(w.numel() for w in model.parameters() if w.requires_grad)
    assert [part.kind for part in found if part.name.startswith("blocks")] == ["4 x Block"]
    lines = table(found)
    assert lines[0].split() == ["part", "kind", "weights", "trainable"]
    assert lines[-1].split() == ["all", f"{sum(p.weights for p in found):,}", f"{sum(p.trainable for p in found):,}"]


def test_weights_outside_of_every_module_are_counted() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(7))
            self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    model = Odd()
    assert sum(part.weights for part in parts(model, Anatomy.of(model))) == 7 + 12


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("dp=4", (400, 400, 800)),
        ("fsdp=4,zero=1", (400, 400, 200)),
        ("fsdp=4,zero=2", (400, 100, 200)),
        ("fsdp=4", (100, 100, 200)),
        ("fsdp=2,cp=2", (100, 100, 200)),
    ],
)
def test_the_arithmetic_of_zero(layout: str, expected: tuple[int, ...]) -> None:
    found = memory(100, 100, Layout.parse(layout), DTYPES["fp32"], 2)
    assert (found.weights, found.gradients, found.optimizer) == expected


def test_frozen_weights_have_no_gradients_and_halves_are_shared() -> None:
    found = memory(100, 10, Layout(), DTYPES["float64"], 1)
    assert (found.weights, found.gradients, found.optimizer) == (800, 80, 80)
    assert share(1000, 800, Layout(tp=2, pp=4)) == 200


@pytest.mark.parametrize(
    ("make", "numbers"),
    [
        (lambda p: optim.SGD(p, 0.1), 0),
        (lambda p: optim.SGD(p, 0.1, momentum=0.9), 1),
        (lambda p: optim.AdamW(p), 2),
        (lambda p: optim.Adam(p, amsgrad=True), 3),
        (lambda p: optim.RMSprop(p), 1),
        (lambda p: optim.Adagrad(p), 1),
    ],
)
def test_what_optimizers_keep(make: Any, numbers: int) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = make([weight])
    assert state_numbers(optimizer) == numbers
    weight.grad = torch.ones(3)
    optimizer.step()
    state = [value for value in optimizer.state[weight].values() if getattr(value, "shape", None) == weight.shape]
    assert len(state) == numbers


def test_a_task_tells_before_it_has_weights() -> None:
    class Plain(Digits):
        def optimizer(self, params: Any) -> Any:
            return optim.SGD(params, lr=0.1)

    task = Plain()
    model = Blueprint(task.model, 0).model
    assert task_state_numbers(task, model) == 0
    assert task_state_numbers(Digits(), model) == 2
    found = described_memory(task, model, task.anatomy(model), Layout(fsdp=2), DTYPES["fp32"])
    assert str(found) == "528 B a rank without activations: weights 264 B, gradients 264 B, optimizer 0 B"
