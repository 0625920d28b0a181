"""What stages send each other: streams of any dtype and shape, in the order of a schedule. (Parity: tests/train.)"""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from phalanx import Layout, WrongUse
from phalanx.parallel.axes.schedules import schedule
from phalanx.parallel.axes.stages import Stages
from phalanx.parallel.axes.transfers import DTYPES, Part, Stream, Transfers
from phalanx.parallel.communication.mesh import Mesh
from phalanx.parallel.communication.narrow import Narrow
from tests.ranks import Ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_header_says_what_comes(dtype: torch.dtype) -> None:
    for stream in (Stream(0, dtype, (2, 3, 4)), Stream(3, dtype, (7,)), Stream(1, dtype, ())):
        assert Stream.decoded(stream.encoded(CPU)) == stream


def step(name: str, shapes: list[tuple[int, ...]]) -> tuple[list[float], list[float]]:
    """Two stages: the first sends the number of each micro-batch, the second sends ten times that back."""
    mesh = Mesh(Layout(pp=2), dist.get_rank(), timedelta(seconds=30))
    parts: dict[tuple[int, int], Part] = {}
    transfers = Transfers(Stages(2, (("a",), ("b",)), {}), mesh, name, parts, CPU, Narrow("exact"))
    batches = [SimpleNamespace(tensors={"x": torch.zeros(shape)}) for shape in shapes]
    forward, backward = [], []
    for _ in range(2):  # in the second step all shapes are known
        actions = [a for a in schedule(name, 2, len(batches))[dist.get_rank()] if a.kind != "weights"]
        transfers.start(batches, actions)
        for action in actions:
            part = parts.setdefault((action.stage, action.micro), Part(action.stage, action.micro))
            if action.kind == "forward" and action.stage == 0:
                part.exit = torch.full(shapes[action.micro], float(action.micro))
                transfers.send_stream(part, 0)
            elif action.kind == "forward":
                part.entry = transfers.received(action).requires_grad_()
                assert part.entry.shape == shapes[action.micro]
                forward.append(float(part.entry.mean()))
            elif action.stage == 1:
                assert part.entry is not None
                (part.entry * 10.0 * part.micro).sum().backward()
                transfers.send_gradient(part, action)
            else:
                backward.append(float(transfers.received(action).mean()))
        transfers.finish()
        parts.clear()
    mesh.close()
    return forward, backward


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb"])
def test_every_stage_gets_what_it_waits_for(ranks: Ranks, name: str) -> None:
    first, second = ranks(2, step, name, [(2, 3), (2, 5), (2, 3), (1, 5)])
    assert second[0] == [0, 1, 2, 3] * 2
    assert first[1] == [0, 10, 20, 30] * 2


def another_shape() -> str:
    mesh = Mesh(Layout(pp=2), dist.get_rank(), timedelta(seconds=30))
    told = ""
    if dist.get_rank() == 0:
        transfers = Transfers(Stages(2, (("a",), ("b",)), {}), mesh, "gpipe", {}, CPU, Narrow("exact"))
        batches = [SimpleNamespace(tensors={"x": torch.zeros(2, 3)}) for _ in range(2)]
        transfers.start(batches, [])
        transfers.send_stream(Part(0, 0, exit=torch.zeros(2, 3)), 0)
        with pytest.raises(WrongUse) as refusal:
            transfers.send_stream(Part(0, 1, exit=torch.zeros(2, 4)), 0)
        told = str(refusal.value)
    else:
        for shape, dtype in (((16,), torch.int64), ((2, 3), torch.float32)):
            mesh.lane("forward", 1).receive(torch.empty(shape, dtype=dtype), 0).wait()
    mesh.close()
    return told


def test_shapes_must_follow_from_the_batch(ranks: Ranks) -> None:
    assert "the stream after a has shape (2, 4) where it had (2, 3) for the same batch" in ranks(2, another_shape)[0]
