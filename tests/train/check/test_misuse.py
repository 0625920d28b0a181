"""Functions of torch that are given what another one wants. Those that are found are in `tests.mistakes`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx
from phalanx.train.check.beside import checked
from phalanx.train.check.misuse import DropoutLeftOn
from tests.mistakes import NotShifted, Points, TwoLayers, WithHeldOut


@dataclass
class Shifted(NotShifted):
    def loss(self, output: Any, batch: dict[str, Any]) -> Any:
        return phalanx.losses.cross_entropy(output[:, :-1], batch["ids"][:, 1:], dim=-1)


@dataclass
class SomeMasked(NotShifted):
    """What is asked for is hidden from the model."""

    def inputs(self, batch: dict[str, Any]) -> Any:
        return batch["ids"].where(torch.arange(12) % 3 > 0, 0)

    def loss(self, output: Any, batch: dict[str, Any]) -> Any:
        return phalanx.losses.cross_entropy(output, batch["ids"].where(torch.arange(12) % 3 == 0, -100), dim=-1)


@dataclass
class ZeroHead(Points):
    """Only the last layer gets a gradient in the first step."""

    def model(self) -> nn.Module:
        model = super().model()
        nn.init.zeros_(model[2].weight)  # type: ignore[index,arg-type]
        return model


@dataclass
class AllIgnored(NotShifted):
    """No target of the first samples counts: the beginning of a long prompt."""

    def loss(self, output: Any, batch: dict[str, Any]) -> Any:
        return phalanx.losses.cross_entropy(output, torch.full_like(batch["ids"], -100), dim=-1)


class Drops(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.dropout(self.a(x).relu(), 0.5, self.training))


@dataclass
class DropsWhileTraining(WithHeldOut):
    def model(self) -> nn.Module:
        return Drops()


@pytest.mark.parametrize("kind", [Shifted, SomeMasked, ZeroHead, AllIgnored, DropsWhileTraining])
def test_nothing_is_found_where_nothing_is(kind: type[Points]) -> None:
    found = checked(kind())
    assert (found.refusal, found.warnings, found.left_out) == ("", [], "")


@pytest.mark.parametrize(
    ("call", "on"),
    [
        (lambda x: F.dropout(x), True),
        (lambda x: F.dropout(x, 0.1), True),
        (lambda x: F.dropout2d(x, p=0.1, training=True), True),
        (lambda x: F.dropout(x, 0.0), False),
        (lambda x: F.dropout(x, 0.1, False), False),
        (lambda x: F.dropout(x, training=False), False),
        (lambda x: F.alpha_dropout(x, 0.1), False),
        (lambda x: F.alpha_dropout(x, 0.1, True), True),
        (lambda x: F.relu(x), False),
    ],
)
def test_dropout_is_on_unless_it_is_told_otherwise(call: Any, on: bool) -> None:
    with DropoutLeftOn() as mode:
        call(torch.ones(2, 3, 4, 4))
    assert bool(mode.found) == on
