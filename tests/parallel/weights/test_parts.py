"""Parts: every box of a described weight is what the whole would hold there, and what can be is made alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from phalanx import counter
from phalanx.parallel.weights.blueprint import Blueprint
from phalanx.parallel.weights.boxes import Box
from phalanx.parallel.weights.parts import parts

CPU = torch.device("cpu")
BOXES = [Box((0, 0), (12, 10)), Box((3, 0), (4, 10)), Box((0, 5), (12, 5)), Box((11, 9), (1, 1)), Box((5, 2), (3, 6))]


class Model(nn.Module):
    def __init__(self, make: Callable[[], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(make())


def initialised(init: Callable[[Tensor], object]) -> Callable[[], Tensor]:
    def make() -> Tensor:
        weight = torch.empty(12, 10)
        with torch.no_grad():
            init(weight)
        return weight

    return make


def padded(weight: Tensor) -> None:
    weight.normal_()
    weight[4].fill_(0)
    weight[6:9].uniform_(-1, 1)


ALONE = {
    "linear": lambda: nn.Linear(10, 12).weight.detach(),
    "normal": initialised(lambda w: nn.init.normal_(w, 1.0, 0.02)),
    "overwritten": initialised(lambda w: w.uniform_().mul_(3).normal_()),
    "truncated": initialised(lambda w: nn.init.trunc_normal_(w, std=1.5)),
    "kaiming": initialised(lambda w: nn.init.kaiming_uniform_(w, a=math.sqrt(5))),
    "ones": lambda: torch.ones(12, 10) * 0.5,
    "scaled": lambda: torch.randn(12, 10) / math.sqrt(10),
    "of two": lambda: torch.rand(12, 10) + torch.randn(12, 10).abs(),
    "row by row": initialised(padded),
    "copied": initialised(lambda w: w.copy_(torch.randn(12, 10))),
}
WHOLE = {
    "orthogonal": initialised(nn.init.orthogonal_),
    "transposed": lambda: torch.randn(10, 12).t().contiguous(),
    "columns": initialised(lambda w: w.normal_()[:, 2:5].zero_()),
    "of another shape": lambda: torch.randn(12, 1) * torch.ones(12, 10),
    "permuted": lambda: torch.randn(12, 10)[torch.randperm(12)],
    "constants": lambda: torch.randn(12, 10) * torch.tensor([[float(i)] * 10 for i in range(12)]),
}


@pytest.mark.parametrize("name", [*ALONE, *WHOLE])
def test_boxes_are_what_the_whole_holds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blueprint = Blueprint(lambda: Model((ALONE | WHOLE)[name]), 7)
    whole = blueprint.value(blueprint.model.weight, "cpu")
    assert whole.std() > 0 or name == "ones"
    if name in ALONE:
        monkeypatch.setattr(Blueprint, "value", lambda *_: pytest.fail("the whole was made"))
    for box, part in zip(BOXES, parts(blueprint, blueprint.model.weight, BOXES, CPU), strict=True):
        (a, b), (rows, columns) = box.offsets, box.sizes
        assert torch.equal(part, whole[a : a + rows, b : b + columns])


def test_a_rank_draws_no_more_than_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    plain = counter.bits

    def counted(stream: int, index: Tensor) -> Tensor:
        drawn.append(index.numel())
        return plain(stream, index)

    monkeypatch.setattr(counter, "bits", counted)
    blueprint = Blueprint(lambda: nn.Linear(1 << 14, 1 << 17), 0)  # 8 GB
    part = parts(blueprint, blueprint.model.weight, [Box((1 << 16, 0), (3, 1 << 14))], CPU)[0]
    assert part.shape == (3, 1 << 14)
    assert sum(drawn) == part.numel()
    assert not parts(blueprint, blueprint.model.weight, [], CPU)


def test_tensors_of_any_number_of_dims() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stacked = nn.Parameter(torch.randn(4, 6, 8))
            self.one = nn.Parameter(torch.randn(()))
            self.bias = nn.Parameter(torch.randn(9))
            self.rows = nn.Parameter(torch.randn(8, 4)[2:6])

    blueprint = Blueprint(Odd, 3)
    model = blueprint.model
    for tensor, box, at in [
        (model.stacked, Box((1, 0, 2), (2, 6, 4)), (slice(1, 3), slice(None), slice(2, 6))),
        (model.one, Box((), ()), ()),
        (model.bias, Box((4,), (5,)), (slice(4, 9),)),
        (model.rows, Box((1, 0), (2, 4)), (slice(1, 3),)),
    ]:
        assert torch.equal(parts(blueprint, tensor, [box], CPU)[0], blueprint.value(tensor, "cpu")[at])
