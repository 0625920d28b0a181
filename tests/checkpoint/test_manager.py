"""A run's checkpoints: committed at once, by the newest generation alone, into free names, and let go in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch

from phalanx.checkpoint.manager import CheckpointManager, Fenced
from phalanx.checkpoint.manifest import Damaged
from phalanx.checkpoint.read import Wanted
from phalanx.checkpoint.store import open_store
from phalanx.parallel.weights.boxes import Box

VALUE = torch.arange(12.0).view(6, 2)


@pytest.fixture(params=["folder", "memory"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointManager]:
    yield CheckpointManager(
        open_store(tmp_path / "checkpoints" if request.param == "folder" else "memory://manager-test")
    )
    if request.param == "memory":
        fsspec.filesystem("memory").rm("/manager-test", recursive=True)


def write(manager: CheckpointManager, generation: int, step: int, rank: int, world: int = 2) -> None:
    rows = len(VALUE) // world
    part = VALUE[rank * rows : (rank + 1) * rows] + step
    shards = [("model/w", Box((rank * rows, 0), (rows, 2)), (6, 2), part)]
    manager.write(generation, step, rank, shards, {"step": step, "world": world}, {f"rank {rank}": rank})


def commit(manager: CheckpointManager, generation: int, step: int, world: int = 2, patience: float = 5.0) -> None:
    manager.commit(generation, step, world, patience, lambda: False)


def save(manager: CheckpointManager, generation: int, step: int) -> None:
    for rank in range(2):
        write(manager, generation, step, rank)
    commit(manager, generation, step)


def test_a_checkpoint_appears_when_it_is_whole(manager: CheckpointManager) -> None:
    manager.fence(1)
    write(manager, 1, 5, 0)
    assert manager.steps() == []
    assert manager.leftovers() == [manager.commits.writing(1, 5)]
    late = threading.Timer(0.1, write, (manager, 1, 5, 1))
    late.start()
    commit(manager, 1, 5)
    late.join()
    assert manager.steps() == [5]
    assert manager.leftovers() == []
    found = manager.open(5)
    assert torch.equal(found.tensor("model/w"), VALUE + 5)
    assert found.manifest.numbers == {"rank 0": 0, "rank 1": 1}
    rows = torch.zeros(3, 2)
    found.read(Wanted({"model/w": [(Box((2, 0), (3, 2)), rows)]}))
    assert torch.equal(rows, VALUE[2:5] + 5)
    assert not list(found.verify())


def test_a_part_that_does_not_come_is_named(manager: CheckpointManager) -> None:
    manager.fence(1)
    write(manager, 1, 5, 1)
    with pytest.raises(TimeoutError, match=r"1 of 2 parts are missing, part-00000\.json among them"):
        commit(manager, 1, 5, patience=0.05)
    with pytest.raises(TimeoutError):
        manager.commit(1, 5, 2, 60, lambda: True)
    manager.abandon(1)
    assert manager.steps() == []
    assert manager.leftovers() == []
    save(manager, 1, 6)
    assert manager.steps() == [6]


def test_what_others_gave_up_is_cleared_when_the_next_is_written(manager: CheckpointManager) -> None:
    manager.fence(1)
    write(manager, 1, 5, 1)
    write(manager, 1, 6, 1)
    manager.abandon(1, but=6)
    assert manager.leftovers() == [manager.commits.writing(1, 6)]


def test_an_old_generation_neither_writes_nor_commits(manager: CheckpointManager) -> None:
    manager.fence(1)
    save(manager, 1, 3)
    write(manager, 1, 5, 0)
    write(manager, 1, 5, 1)  # all but the commit
    manager.fence(2)
    with pytest.raises(Fenced, match="generation 1"):
        write(manager, 1, 6, 0)
    with pytest.raises((Fenced, TimeoutError)):
        commit(manager, 1, 5, patience=0.05)
    with pytest.raises(Fenced, match="generation 1 of this run is over"):
        manager.fence(1)
    assert manager.steps() == [3]
    assert manager.leftovers() == []
    save(manager, 2, 5)
    assert manager.steps() == [3, 5]


def test_a_fence_between_the_last_look_and_the_commit_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = CheckpointManager(open_store(tmp_path))
    manager.fence(1)
    write(manager, 1, 5, 0)
    write(manager, 1, 5, 1)
    looked = manager.check_fence

    def look(generation: int) -> None:
        looked(generation)
        CheckpointManager(open_store(tmp_path)).fence(2)

    monkeypatch.setattr(manager, "check_fence", look)
    with pytest.raises(Fenced, match="generation 1 may not commit step 5"):
        commit(manager, 1, 5)
    monkeypatch.undo()
    monkeypatch.setattr(manager, "check_fence", lambda generation: None)
    with pytest.raises(Fenced, match="generation 1 may not write step 5"):
        write(manager, 1, 5, 0)
    assert manager.steps() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [".writing-00002"]


def test_a_checkpoint_that_is_there_is_left_as_it_is(manager: CheckpointManager) -> None:
    manager.fence(1)
    save(manager, 1, 5)
    before = {name: manager.store.read(f"step-00000005/{name}") for name in manager.store.names("step-00000005")}
    write(manager, 1, 5, 0, world=1)
    with pytest.raises(FileExistsError, match="step-00000005 is there already"):
        commit(manager, 1, 5, world=1)
    assert before == {
        name: manager.store.read(f"step-00000005/{name}") for name in manager.store.names("step-00000005")
    }


def test_a_part_that_shrank_is_not_committed(tmp_path: Path) -> None:
    manager = CheckpointManager(open_store(tmp_path))
    manager.fence(1)
    write(manager, 1, 5, 0)
    write(manager, 1, 5, 1)
    part = tmp_path / ".writing-00001" / "step-00000005" / "part-00001.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(Damaged, match=r"part-00001\.safetensors is shorter than what was written to it"):
        commit(manager, 1, 5)
    assert manager.steps() == []


def test_what_is_kept(manager: CheckpointManager) -> None:
    manager.fence(1)
    for step in (2, 3, 4, 5):
        save(manager, 1, step)
    assert manager.retain(5, 2, 2) == [3]
    assert manager.steps() == [2, 4, 5]
    assert manager.retain(5, 1, 0, sure=[None, 3]) == [4]
    assert manager.retain(4, 1, 0) == [], "what is newer was not gone on from, and counts for nothing"
    assert manager.retain(5, 1, 0) == [2]
    assert manager.retain(5, 1, 0) == []
    assert not list(manager.open(5).verify())


def test_a_damaged_one_is_set_aside(manager: CheckpointManager) -> None:
    manager.fence(1)
    for _ in range(2):
        save(manager, 1, 5)
        manager.set_aside(5)
    assert manager.steps() == []
    assert manager.damaged() == ["damaged-step-00000005", "damaged-step-00000005-1"]
    save(manager, 1, 5)
    assert manager.steps() == [5]
    assert len(manager.store.names("damaged-step-00000005")) == 5


def test_half_a_folder_without_a_rename_is_no_checkpoint() -> None:
    """There, or in what an older version has left: the manifest comes last."""
    manager = CheckpointManager(open_store("memory://checkpoint manager-half"))
    with manager.store.write("step-00000005/part-00000.json") as file:
        file.write(b"")
    assert manager.steps() == []
    manager.fence(1)
    save(manager, 1, 5)
    assert manager.steps() == [5]
    fsspec.filesystem("memory").rm("/checkpoint manager-half", recursive=True)
