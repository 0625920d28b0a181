"""A method that is changed between steps loses nothing of what was owed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.layout import Layout
from phalanx.parallel.communication.codecs.chosen import Coding
from phalanx.parallel.communication.codecs.owed import Owed
from phalanx.parallel.communication.codecs.switched import Switched
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.memory import Buffers
from phalanx.parallel.communication.traffic import Traffic
from tests.ranks import Ranks

CPU, RANKS, SIZE = torch.device("cpu"), 2, 4096
METHODS = ["int4", "int4", "exact", "int4", "bf16", "bf16", "exact", "int4", "int8", "exact"]
LEFT_OUT = 2


def gradient(rank: int, step: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def run() -> tuple[list[Tensor], Tensor]:
    """Each step's sum, and what is owed after the last."""
    coding = Coding.of(Layout(dp=2, comm="auto"))
    assert coding is not None
    codec = coding.gradients
    assert isinstance(codec, Switched)
    group, buffers = Communicator(dist.group.WORLD, Traffic(), "dp"), Buffers(CPU)
    every = Owed((1, SIZE), torch.float64, CPU), Owed((SIZE // RANKS,), torch.float64, CPU)
    sums = []
    for step, method in enumerate(METHODS):
        codec.choose(method)
        x = gradient(dist.get_rank(), step)
        codec.all_reduce(group, x, *every, buffers).wait()
        for owed in every:
            owed.end_step(step != LEFT_OUT, 1.0)
        codec.end_step(step != LEFT_OUT)
        sums.append(x)
    return sums, torch.cat([owed.now.flatten() for owed in every])


def test_all_that_was_owed_arrives(ranks: Ranks) -> None:
    (sums, owed), (others, owed_there) = ranks(RANKS, run)
    assert all(torch.equal(one, other) for one, other in zip(sums, others, strict=True))
    assert not owed.any()
    assert not owed_there.any()
    exact = [sum(gradient(rank, step) for rank in range(RANKS)) for step in range(len(METHODS))]
    kept = [step for step in range(len(METHODS)) if step != LEFT_OUT]
    rounded = [step for step in kept if METHODS[step] in ("bf16", "int8")]
    before = [step for step in kept if step < min(rounded)]
    came, right = sum(sums[step] for step in before), sum(exact[step] for step in before)
    assert not torch.allclose(came, right, rtol=0, atol=1e-9)  # int4 still owes, until bf16 has sent it
    first = [step for step in kept if step <= rounded[0]]
    came, right = sum(sums[step] for step in first), sum(exact[step] for step in first)
    assert (came - right).norm() < 0.02 * exact[0].norm()  # bf16's own rounding
    assert torch.equal(sums[6], exact[6])  # nothing was owed any more, and nothing is rounded
