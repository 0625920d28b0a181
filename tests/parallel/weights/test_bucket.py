"""Buckets: weights made whole by one collective, gradients summed by one, for sizes that divide and that do not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.copying import Copying
from phalanx.parallel.communication.memory import Buffers
from phalanx.parallel.communication.traffic import Traffic
from phalanx.parallel.weights.bucket import Bucket
from phalanx.parallel.weights.storage import Storage
from phalanx.parallel.weights.weight import Weight
from tests.parallel.weights.test_packing import EVEN, SHAPES, holder
from tests.ranks import Ranks

CPU = torch.device("cpu")


def known(index: int, shape: tuple[int, ...], factor: float = 1.0) -> Tensor:
    return factor * (index + torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64)).view(shape)


def travel(shapes: list[tuple[int, ...]], compute: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """A bucket's whole weights, and what this rank then owns of its gradients' sums."""
    group, wide = Communicator(dist.group.WORLD, Traffic()), torch.float64
    storage = Storage(
        dist.get_world_size(),
        dist.get_rank(),
        group,
        wide,
        compute,
        wide,
        CPU,
        CPU,
        Buffers(CPU),
        Copying(CPU),
        False,
        False,
    )
    made = []
    for index, shape in enumerate(shapes):
        weight = Weight(
            f"w{index}", torch.nn.Parameter(torch.empty(shape)), torch.Size(shape), [(holder(), "w")], storage
        )
        weight.make_room()
        weight.shard.data.copy_(weight.own_rows(known(index, shape)))
        made.append(weight)
    bucket = Bucket("block", made, storage)
    bucket.start_gather()
    bucket.finish_gather()
    wholes = [weight.full.data.clone() for weight in made]
    for index, weight in enumerate(made):
        bucket.collect(weight, known(index, weight.shape, dist.get_rank() + 1.0).to(compute))
    bucket.complete()
    bucket.start_scatter().wait()
    bucket.release()
    return wholes, [bucket.gradient_own(weight).clone() for weight in made]


@pytest.mark.parametrize("shapes", [SHAPES, EVEN], ids=["uneven", "even"])
@pytest.mark.parametrize("compute", [torch.float64, torch.float32])
def test_weights_are_gathered_and_gradients_summed(
    ranks: Ranks, shapes: list[tuple[int, ...]], compute: torch.dtype
) -> None:
    for world in (2, 3):
        answers = ranks(world, travel, shapes, compute)
        for index, shape in enumerate(shapes):
            whole = known(index, shape)
            for wholes, _ in answers:
                assert torch.equal(wholes[index].double(), whole)
            summed = torch.cat([owned[index].reshape(-1) for _, owned in answers])
            assert torch.equal(summed, whole.reshape(-1) * sum(range(1, world + 1)))
