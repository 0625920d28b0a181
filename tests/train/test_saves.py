"""A save goes from stage to stage, and whoever waits for one is let go when it is there, or will never be."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from phalanx.checkpoint.slot import Slot
from phalanx.checkpoint.state import Entry
from phalanx.parallel.weights.boxes import Box
from phalanx.train import saves
from phalanx.train.engine import Engine
from phalanx.train.saves import Save, Stage, short_of_memory
from tests.tasks import Digits


def entries() -> list[Entry]:
    still, restless = torch.arange(6.0).view(2, 3), torch.ones(2)
    return [
        Entry("model/a", Box.whole(still), (2, 3), still),
        Entry("model/b", Box.whole(restless), (2,), restless, restless=True),
    ]


def made(slot: Slot, held: list[Entry], to_file: bool = True) -> Save:
    return Save(slot, to_file, {"step": 7}, {}, held, torch.device("cpu"))


@pytest.fixture
def slot() -> Any:
    slot = Slot()
    yield slot
    slot.close()


def test_what_a_forward_may_change_is_copied_at_once(slot: Slot) -> None:
    held = entries()
    save = made(slot, held)
    assert slot.step() is None, "it is not whole yet"
    for entry in held:
        entry.value.add_(10)
    save.copy()
    assert slot.step() == 7
    found = {place.name: tensor for place, tensor in slot.staged().tensors}
    assert torch.equal(found["model/a"], torch.arange(6.0).view(2, 3) + 10)
    assert torch.equal(found["model/b"], torch.ones(2))


@pytest.mark.parametrize("fails", [False, True])
def test_whoever_waits_is_let_go(slot: Slot, fails: bool) -> None:
    save, past = made(slot, entries()), []

    def wait() -> None:
        for stage in (Stage.STAGED, Stage.WRITTEN, Stage.DONE):
            save.wait(stage)
            past.append(stage)

    waiting = threading.Thread(target=wait)
    waiting.start()
    save.advance(Stage.STAGED)
    assert not save.over
    assert Stage.WRITTEN not in past
    if fails:
        save.advance(Stage.FAILED, OSError("no room"))
    else:
        save.advance(Stage.WRITTEN)
        save.advance(Stage.DONE)
    waiting.join(timeout=10)
    assert past == [Stage.STAGED, Stage.WRITTEN, Stage.DONE]
    assert save.over
    assert save.committed != fails
    assert (save.error is not None) == fails


def test_no_stage_comes_again(slot: Slot) -> None:
    save = made(slot, entries(), to_file=False)
    save.advance(Stage.DONE)
    assert not save.committed, "it is in memory alone"
    for stage in (Stage.COPYING, Stage.STAGED, Stage.DONE):
        with pytest.raises(AssertionError, match="does not become"):
            save.advance(stage)


def test_copies_take_no_more_than_half_of_what_is_left(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(Digits(), device="cpu") as engine:  # 32 bytes in 8 numbers
        for free, short in ((64 * 2, False), (64 * 2 - 1, True), (None, False)):
            monkeypatch.setattr(saves, "free_memory", lambda free=free: free)
            assert bool(short_of_memory(engine, entries(), [slot], 2)) == short
