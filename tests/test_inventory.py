"""What a model weighs: parts that add up."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx.anatomy import Anatomy
from phalanx.inventory import parts, table
from phalanx.parallel.weights.blueprint import Blueprint
from phalanx.recipes.gpt import GPT
from phalanx.recipes.sft import SFT


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


def test_weights_in_4_bits_are_counted_as_weights() -> None:
    wide, narrow = (SFT(lora=2, four_bit=four_bit).model() for four_bit in (False, True))
    assert parts(narrow, Anatomy.of(narrow)) == parts(wide, Anatomy.of(wide))


def test_weights_outside_of_every_module_are_counted() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(7))
            self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    model = Odd()
    assert sum(part.weights for part in parts(model, Anatomy.of(model))) == 7 + 12
