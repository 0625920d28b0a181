"""Slots: a copy that outlives its process, whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from phalanx.checkpoint.slot import Slot, new_memory
from phalanx.checkpoint.state import Entry
from phalanx.parallel.weights.boxes import Box

VALUES = {
    "matrix": torch.arange(15.0).view(5, 3).double(),
    "half": torch.arange(7).bfloat16(),
    "number": torch.tensor(3.0),
    "count": torch.tensor(41),
    "mask": torch.tensor([True, False, True]),
    "nothing": torch.zeros(0, 4),
}
ENTRIES = [
    Entry(name, Box.whole(value), tuple(value.shape), value, written=name != "mask") for name, value in VALUES.items()
]


@pytest.fixture
def memory() -> Iterator[int]:
    memory = new_memory()
    yield memory
    os.close(memory)


def stage(slot: Slot, step: int, entries: list[Entry] = ENTRIES) -> None:
    for place, entry in zip(slot.lay_out(entries), entries, strict=True):
        place.copy_(entry.value)
    slot.seal({"step": step, "tied": {}}, {"a": 1, "b": None})


def test_another_process_finds_the_copy(memory: int) -> None:
    child = os.fork()
    if not child:
        stage(Slot(memory), 7)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    slot = Slot(memory)
    assert slot.step() == 7
    staged = slot.staged()
    assert (staged.step, staged.numbers) == (7, {"a": 1, "b": None})
    assert [place.name for place, _ in staged.tensors] == list(VALUES)
    for place, tensor in staged.tensors:
        assert torch.equal(tensor, VALUES[place.name])
        assert tensor.dtype == VALUES[place.name].dtype
        assert place.written == (place.name != "mask")


def test_until_it_is_sealed_there_is_nothing(memory: int) -> None:
    slot = Slot(memory)
    assert slot.step() is None
    stage(slot, 3)
    slot.lay_out(ENTRIES)
    assert slot.step() is None
    assert Slot(memory).step() is None
    stage(slot, 4)
    assert Slot(memory).step() == 4
    slot.void()
    assert Slot(memory).step() is None


def test_it_grows_and_takes_another_layout(memory: int) -> None:
    slot = Slot(memory)
    stage(slot, 1, ENTRIES[2:3])
    large = torch.arange(100_000.0)
    stage(slot, 2, [*ENTRIES, Entry("large", Box.whole(large), (100_000,), large)])
    assert torch.equal({p.name: t for p, t in Slot(memory).staged().tensors}["large"], large)
    stage(slot, 3, ENTRIES[:1])
    assert [place.name for place, _ in Slot(memory).staged().tensors] == ["matrix"]


def test_a_copy_goes_to_another_slot(memory: int) -> None:
    stage(Slot(memory), 9)
    origin, guest = Slot(memory), Slot()
    coming = origin.summary()
    room = guest.room(coming)
    assert guest.step() is None
    room.copy_(origin.content())
    assert guest.step() is None
    guest.admit(coming)
    assert guest.step() == 9
    assert all(torch.equal(tensor, VALUES[place.name]) for place, tensor in guest.staged().tensors)
    guest.close()
