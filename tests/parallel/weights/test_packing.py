"""Packed weights: every row in its place, for sizes that divide and sizes that do not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx.parallel.communication.copying import Copying
from phalanx.parallel.communication.memory import Buffers
from phalanx.parallel.weights.packing import ALIGNED, Packing, one_room
from phalanx.parallel.weights.storage import Storage
from phalanx.parallel.weights.weight import Weight

CPU = torch.device("cpu")


def storage(ranks: int, rank: int) -> Storage:
    f = torch.float32
    return Storage(
        ranks, rank, None, f, f, f, CPU, CPU, Buffers(CPU), Copying(CPU), always_whole=True, whole_gradients=True
    )


def holder() -> nn.Module:
    """A module with room for a weight."""
    made = nn.Module()
    made.register_parameter("w", None)
    return made


def weights(ranks: int, rank: int, shapes: list[tuple[int, ...]]) -> list[Weight]:
    made = []
    for index, shape in enumerate(shapes):
        weight = Weight(
            f"w{index}", nn.Parameter(torch.empty(shape)), torch.Size(shape), [(holder(), "w")], storage(ranks, rank)
        )
        weight.make_room()
        weight.full.data.copy_(torch.arange(float(torch.Size(shape).numel())).view(shape))
        made.append(weight)
    return made


SHAPES = [(4, 3), (7, 2), (1, 5), (), (13,), (3, 2, 2)]
EVEN = [(8, 3), (24, 2), (16,), (8, 2, 2)]


@pytest.mark.parametrize("shapes", [SHAPES, EVEN], ids=["uneven", "even"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_pieces_and_padding_make_the_whole(ranks: int, shapes: list[tuple[int, ...]]) -> None:
    made = [weights(ranks, rank, shapes) for rank in range(ranks)]
    packing = Packing(made[0])
    flat = torch.full((ranks, packing.length), -1.0)
    places = packing.places(flat)
    for weight in made[0]:
        for part, place in weight.pairs(weight.full.data, places[weight.name]):
            place.copy_(part)
    for rank, owned in enumerate(made):
        row = torch.full((packing.length,), -1.0)
        Packing(owned).pack(row)
        assert torch.equal(row, flat[rank])
        for weight in owned:
            assert torch.equal(packing.own(weight, flat[rank]), weight.shard.data)
            assert torch.equal(packing.place(weight, flat), places[weight.name])
    before = [weight.full.data.clone() for weight in made[0]]
    for weight in made[0]:
        weight.full.data.fill_(-2)
    packing.unpack(flat)
    for weight, known in zip(made[0], before, strict=True):
        assert torch.equal(weight.full.data, known)
        rows = sum(
            len(owned.shard) if owned.shard.ndim else 1 for rank in made for owned in rank if owned.name == weight.name
        )
        assert rows == weight.rows, "rows are lost or doubled"


def test_memory_that_was_put_in_a_weights_place_is_packed() -> None:
    owned = weights(2, 0, EVEN)
    packing, row = Packing(owned), torch.empty(Packing(owned).length)
    packing.pack(row)
    owned[1].shard.data = torch.full_like(owned[1].shard.data, 7.0)
    packing.pack(row)
    assert packing.own(owned[1], row).eq(7).all()


def test_weights_in_one_room_are_let_go_together() -> None:
    owned = weights(2, 0, SHAPES)
    versions = [weight.full._version for weight in owned]
    room = one_room(owned)
    assert all(weight.full.untyped_storage().size() == 0 for weight in owned)
    room.open()
    for index, weight in enumerate(owned):
        assert weight.full.data_ptr() % ALIGNED == owned[0].full.data_ptr() % ALIGNED
        weight.full.data.fill_(index)
    assert all(weight.full.eq(index).all() and weight.full.shape == weight.shape for index, weight in enumerate(owned))
    assert [weight.full._version for weight in owned] == versions
