"""Inputs of blocks that wait on the host: the same gradients, with less on the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from phalanx.parallel.blocks.host_inputs import HostInputs, HostRoom, Parked
from phalanx.parallel.blocks.recompute import Recompute
from phalanx.parallel.forward.wrapper import wrap
from phalanx.parallel.randomness.draws import Moment, Randomness


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.down(self.up(x).sin()) * mask


def blocks(layers: int, width: int, device: torch.device, kind: str) -> tuple[list[Block], list[Parked]]:
    """Alike for all kinds of recompute; and what was ever parked, if it is on the host."""
    torch.manual_seed(0)
    found, parked = [Block(width).double().to(device) for _ in range(layers)], []

    class Noting(HostRoom):
        def put(self, inputs: set[int], tensor: Tensor) -> Tensor | Parked:
            kept = super().put(inputs, tensor)
            if isinstance(kept, Parked):
                parked.append(kept)
            return kept

    room, keyed = Noting(device), Randomness(0, Moment(slots=np.arange(2)), device)
    for block in found:
        around = [HostInputs(room, device, least_bytes=1024)] if kind == "host" else []
        wrap(block, *around, *([] if kind == "none" else [Recompute(keyed, kind)]))
    return found, parked


def gradients(layers: int, width: int, rows: int, device: torch.device, kind: str) -> list[Tensor]:
    made, parked = blocks(layers, width, device, kind)
    x = torch.linspace(-1, 1, rows * width, dtype=torch.float64, device=device).view(rows, width).requires_grad_()
    mask = torch.ones(rows, 1, dtype=torch.float64, device=device)
    stream = x
    for block in made:
        stream = block(stream, mask)
    if kind == "host":
        assert len(parked) == layers
        assert [each.tensor is None for each in parked] == [True] * (layers - 1) + [False]
    stream.square().sum().backward()
    return [x.grad, *(weight.grad for block in made for weight in block.parameters())]  # type: ignore[list-item]


def test_gradients_are_the_same_bits() -> None:
    device = torch.device("cpu")
    kept, again = (gradients(3, 16, 32, device, kind) for kind in ("none", "host"))
    for ours, theirs in zip(again, kept, strict=True):
        assert torch.equal(ours, theirs)


def test_small_inputs_and_those_without_gradients_stay() -> None:
    device = torch.device("cpu")
    room = HostRoom(device)
    layer, kept = HostInputs(room, device, least_bytes=1024), []

    def rest(*given: Tensor) -> Tensor:
        found = given[0].exp()
        kept.append(found.grad_fn)
        return found

    large, small = torch.ones(32, 16, requires_grad=True), torch.ones(2, requires_grad=True)
    for x in (large, small, torch.ones(32, 16)):
        layer(rest, x)
    assert room._newest is None, "exp keeps its result, and that is no input"


def test_one_may_be_asked_for_again_and_brings_the_one_before() -> None:
    room, given = HostRoom(torch.device("cpu")), [torch.full((4,), float(number)) for number in range(3)]
    parked = [room.put({each.data_ptr()}, each) for each in given]
    assert all(isinstance(each, Parked) for each in parked)
    for number in (2, 2, 0, 1):
        assert torch.equal(room.take(parked[number]), given[number])
    assert parked[0].tensor is not None  # type: ignore[union-attr]
    assert room.take(given[0]) is given[0]


@pytest.mark.gpu
def test_a_gpu_holds_less_and_computes_the_same() -> None:
    device, found, peaks = torch.device("cuda"), {}, {}
    for kind in ("full", "host"):
        gradients(2, 256, 64, device, kind)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found[kind] = gradients(24, 256, 1 << 14, device, kind)
        peaks[kind] = torch.cuda.max_memory_allocated() - before
    for ours, theirs in zip(found["host"], found["full"], strict=True):
        assert torch.equal(ours, theirs)
    of_an_input = (1 << 14) * 256 * 8
    assert peaks["full"] - peaks["host"] > 18 * of_an_input, peaks
