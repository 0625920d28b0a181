"""Entering the first block and leaving the last: shards and back, with gradients, over cp and tp."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import phalanx
from phalanx import Layout, WrongUse
from phalanx.parallel.blocks.boundary import Boundary, SequenceSharding
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.traffic import Traffic
from phalanx.parallel.forward.activations import Activations
from tests.parity import HostileLanguage
from tests.ranks import Ranks


def there_and_back(layout: str, length: int) -> tuple[list[int], float, float]:
    """A rank's positions; how far the stream is off after a block that doubles it, and how far its gradient is."""
    with phalanx.Engine(HostileLanguage(), Layout.parse(layout), device="cpu") as engine:
        sharding: SequenceSharding = engine.spread.sharding
        torch.manual_seed(0)
        x = torch.randn(2, length, 3, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(2, length, 3, dtype=torch.float64)
        places: list[int] = []

        def block(hidden: Tensor) -> tuple[Tensor, str]:
            stream = sharding.activations.stream
            assert stream.time is not None
            assert torch.equal(hidden, x[:, stream.time])
            places.extend(stream.time.tolist())
            return 2 * hidden, "beside"

        with engine.spread.randomness.scope("task"):
            output, beside = Boundary("blocks.0", sharding, True, True)(block, x)
            assert sharding.activations.stream.time is None
        assert beside == "beside"
        (output * weight / engine.mesh.size("cp")).sum().backward()
        assert x.grad is not None
        engine.mesh.group("cp").all_reduce(x.grad).wait()  # each rank has a part of the gradient
        return places, float((output - 2 * x).abs().max()), float((x.grad - 2 * weight).abs().max())


@pytest.mark.parametrize("layout", ["tp=2", "cp=2", "tp=2,cp=2"])
@pytest.mark.parametrize("length", [8, 7, 3])
def test_the_stream_is_sharded_and_whole_again(ranks: Ranks, layout: str, length: int) -> None:
    answers = ranks(Layout.parse(layout).world, there_and_back, layout, length)
    assert sorted(place for places, _, _ in answers for place in places) == list(range(length))
    for _, values, gradients in answers:
        assert values == 0
        assert gradients < 1e-12


def out_of_order(layout: str) -> str:
    with phalanx.Engine(HostileLanguage(), Layout.parse(layout), device="cpu") as engine:
        with pytest.raises(WrongUse) as refusal:
            Boundary("blocks.1", engine.spread.sharding, False, True)(lambda x: x, torch.randn(2, 8, 3))
        return str(refusal.value)


@pytest.mark.parametrize("layout", ["tp=2", "cp=2"])
def test_a_block_that_is_called_out_of_order_is_refused(ranks: Ranks, layout: str) -> None:
    for told in ranks(2, out_of_order, layout):
        assert told.startswith(f"blocks.1 is called out of order, so {layout} cannot tell which positions it has")


def test_a_later_stage_takes_what_it_received() -> None:
    sharding = SequenceSharding(Activations(), None, Communicator(None, Traffic()), torch.device("cpu"))

    def receive(name: str, args: Any, kwargs: Any) -> Any:
        return ((args[0] + 1,), kwargs) if name == "blocks.2" else None

    x = torch.randn(2, 3)
    for name, expected in (("blocks.2", x + 1), ("blocks.3", x)):
        assert torch.equal(Boundary(name, sharding, False, False, receive)(lambda given: given, x), expected)
