import gc
import mmap
from pathlib import Path

import pytest
import torch

from phalanx.parallel.communication.memory import LARGE_BYTES, Buffers, Room

CPU = torch.device("cpu")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("count", [3, LARGE_BYTES])
def test_a_room_keeps_its_tensor_through_emptying(count: int) -> None:
    room = Room((count, 2), torch.float32, CPU)
    for value in (1.0, 2.0):
        room.open()
        room.tensor.fill_(value)
        assert bool((room.tensor == value).all())
        room.empty()
        assert room.tensor.shape == (count, 2)


def test_what_autograd_saved_sees_what_is_put_there_later() -> None:
    room = Room((512, 512), torch.float64, CPU)
    x = torch.randn(4, 512, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(512, 512, dtype=torch.float64)
    room.tensor.copy_(weight)
    y = x @ room.tensor
    room.empty()
    room.open()
    room.tensor.data.copy_(weight)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(4, 512, dtype=torch.float64) @ weight.T)


def test_an_empty_room_holds_no_memory() -> None:
    room = Room((64 << 20,), torch.uint8, CPU)
    before = resident()
    room.tensor.fill_(1)
    assert resident() - before > 60 << 20
    room.empty()
    assert resident() - before < 4 << 20


def test_buffers_are_lent_again_and_never_to_two() -> None:
    buffers = Buffers(CPU)
    first = buffers.take(4, 1000, dtype=torch.float32)
    second = buffers.take(4, 1000, dtype=torch.float32)
    first.fill_(1.0)
    second.fill_(2.0)
    assert bool((first == 1.0).all())
    place = first.data_ptr()
    buffers.give(first)
    again = buffers.take(500, dtype=torch.float64)
    assert again.data_ptr() == place
    assert again.shape == (500,)
    assert bool((second == 2.0).all())


def test_a_larger_buffer_takes_the_place_of_a_smaller() -> None:
    """As many rooms as were ever out at once, no more."""
    buffers = Buffers(CPU)
    before = resident()
    for megabytes in range(1, 17):
        tensor = buffers.take(megabytes << 20, dtype=torch.uint8)
        tensor.fill_(1)
        buffers.give(tensor)
        del tensor
    gc.collect()
    assert resident() - before < 20 << 20
