"""Buckets: every row in its place, for sizes that divide and sizes that do not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx.parallel.communication.memory import Buffers
from phalanx.parallel.weights.bucket import Packing, Weight
from phalanx.parallel.weights.storage import Storage

CPU = torch.device("cpu")


def storage(ranks: int, rank: int) -> Storage:
    f = torch.float32
    return Storage(ranks, rank, None, f, f, f, CPU, CPU, Buffers(CPU), always_whole=True, whole_gradients=True)


def weights(ranks: int, rank: int, shapes: list[tuple[int, ...]]) -> list[Weight]:
    made = []
    for index, shape in enumerate(shapes):
        holder = nn.Module()
        holder.register_parameter("w", None)
        weight = Weight(
            f"w{index}", nn.Parameter(torch.empty(shape)), torch.Size(shape), [(holder, "w")], storage(ranks, rank)
        )
        weight.make_room()
        weight.full.data.copy_(torch.arange(float(torch.Size(shape).numel())).view(shape))
        made.append(weight)
    return made


SHAPES = [(4, 3), (7, 2), (1, 5), (), (13,), (3, 2, 2)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_pieces_and_padding_make_the_whole(ranks: int) -> None:
    made = [weights(ranks, rank, SHAPES) for rank in range(ranks)]
    packing = Packing(made[0])
    flat = torch.full((ranks, packing.length), -1.0)
    for weight in made[0]:
        for part, place in packing.pairs(weight, weight.full.data, flat):
            place.copy_(part)
    for rank, owned in enumerate(made):
        for weight in owned:
            assert torch.equal(packing.own(weight, flat[rank]), weight.shard.data)
    for weight in made[0]:
        back = torch.empty(weight.shape)
        for part, place in packing.pairs(weight, back, flat):
            part.copy_(place)
        assert torch.equal(back, weight.full.data)
        rows = sum(
            len(owned.shard) if owned.shard.ndim else 1 for rank in made for owned in rank if owned.name == weight.name
        )
        assert rows == weight.rows, "rows are lost or doubled"


def test_pieces_keep_their_dims_and_share_memory_where_they_can() -> None:
    weight = weights(2, 1, [(5, 3)])[0]
    assert weight.shard.shape == (2, 3)
    weight.shard.data.fill_(7)
    assert (weight.full.data[3:] == 7).all()
    alone = weights(1, 0, [(5, 3)])[0]
    assert alone.shard is alone.full
    assert alone.shard.logical_name == "w0"
