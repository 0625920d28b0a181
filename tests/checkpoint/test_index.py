"""A description in parts: sums up what ranks say, and leads whoever wants some rows to those who have them, only."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.checkpoint.index import (
    Child,
    below,
    box_around,
    check_covers,
    check_sum,
    groups,
    needed,
    part_name,
    summed,
)
from phalanx.checkpoint.manager import Checkpoint, CheckpointManager
from phalanx.checkpoint.manifest import MANIFEST, Chunk, Damaged, Held, Manifest, digest
from phalanx.checkpoint.read import Wanted
from phalanx.checkpoint.store import Folder
from phalanx.parallel.weights.boxes import Box
from tests.checkpoint.test_manifest import part

WORLD, ROWS = 130, 260
VALUE = torch.arange(ROWS * 3.0).view(ROWS, 3)


def rows(first: int, count: int) -> Box:
    return Box((first, 0), (count, 3))


def child(found: Manifest, rank: int = 0) -> Child:
    return Child(part_name(rank), found, digest(found.to_json()))


def test_parts_make_a_whole() -> None:
    """Each stage knows what an optimizer changed for its own weights alone."""
    parts = [part(0, 3, 0, options={"w": {"k": 1}}), part(3, 2, 1, options={"v": {"k": 2}})]
    whole = summed([child(found, rank) for rank, found in enumerate(parts)])
    check_sum(whole)
    assert whole.tensors["model/w"].hash == 21
    assert whole.size == 40
    assert whole.numbers == {"counters/n/0": 0, "counters/n/1": 1}
    assert whole.facts["options"] == {"w": {"k": 1}, "v": {"k": 2}}
    assert Manifest.parse(whole.to_json(), "here") == whole
    with pytest.raises(AssertionError, match="model/w: 6 of 10 elements"):
        check_sum(summed([child(part(0, 3))]))
    with pytest.raises(Damaged, match="was written by another attempt"):
        summed([child(part(0, 3)), child(part(3, 2, 1, seed=7), 1)])


def test_who_sums_up_whom() -> None:
    assert groups(64) == []
    assert below(2) == ["part-00000.json", "part-00001.json"]
    assert groups(130) == [range(64), range(64, 128), range(128, 130)]
    assert below(130) == ["group-00000.json", "group-00001.json", "group-00002.json"]
    assert len(below(10_240)) == 160


def test_boxes() -> None:
    assert box_around([Box((2, 1), (1, 1)), Box((0, 4), (1, 2))]) == Box((0, 1), (3, 5))
    assert box_around([Box((), ())]) == Box((), ())
    chunks = [Chunk("w", rows(a, 2), "", 0, 0, 0) for a in (0, 2, 4)]
    check_covers("w", [rows(1, 3), rows(0, 6)], chunks, "here")
    for wrong in (chunks[:1], chunks[1:], [*chunks, chunks[1]], []):
        with pytest.raises(Damaged, match="here describes no checkpoint: its chunks do not make up w"):
            check_covers("w", [rows(1, 3)], wrong, "here")


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> CheckpointManager:
    """A checkpoint of many ranks, each with two rows."""
    manager = CheckpointManager(Folder(tmp_path_factory.mktemp("many")))
    manager.fence(1)
    for rank in range(WORLD):
        own = VALUE[2 * rank : 2 * rank + 2]
        shards = [("model/w", rows(2 * rank, 2), (ROWS, 3), own)]
        manager.write(1, 5, rank, shards, {"step": 5, "world": WORLD}, {})
    with pytest.raises(TimeoutError, match=r"3 of 3 parts are missing, group-00000\.json among them"):
        manager.commit(1, 5, WORLD, 0.0, lambda: False)
    for ranks in groups(WORLD):
        manager.gather(1, 5, ranks, 5.0)
    manager.commit(1, 5, WORLD, 5.0, lambda: False)
    return manager


def test_a_rank_reads_only_what_it_needs(manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    read, files = Folder.read, []

    def noted(store: Folder, name: str, start: int = 0, stop: int | None = None) -> bytes:
        files.append(Path(name).name)
        return read(store, name, start, stop)

    monkeypatch.setattr(Folder, "read", noted)
    found = torch.zeros(3, 3)
    manager.open(5).read(Wanted({"model/w": [(rows(127, 3), found)]}))
    assert torch.equal(found, VALUE[127:130])
    assert files[:1] == [MANIFEST]
    described = ["group-00000.json", "group-00001.json", "part-00063.json", "part-00064.json"]
    assert sorted(file for file in files if file.endswith("json") and file != MANIFEST) == described
    assert len(files) == 1 + 4 + 2


def test_all_of_it_is_read_and_checked(manager: CheckpointManager) -> None:
    found = manager.open(5)
    assert torch.equal(found.tensor("model/w"), VALUE)
    assert found.manifest.size == VALUE.numel() * 4
    assert not list(found.verify())
    path = Path(found.where) / "part-00099.json"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"part-00099", b"part-00098"))
    assert [str(damage.file) for damage in manager.open(5).verify()] == [str(path)]
    path.write_bytes(content)


def forged(path: Path, change: Callable[[dict[str, Any]], None]) -> bytes:
    found = json.loads(path.read_bytes().decode().splitlines()[0])
    change(found)
    text = json.dumps(found)
    return f"{text}\n{zlib.crc32(text.encode()):08x}\n".encode()


def to(**changed: Any) -> Callable[[dict[str, Any]], None]:
    return lambda found: found["tensors"]["model/w"].update(changed)


FORGED = {
    "nowhere": to(where=[]),
    "nothing": to(where=[[0]]),
    "no numbers": to(where=[["0", [0, 0], [260, 3]]]),
    "a part that is not": to(where=[[7, [0, 0], [260, 3]]]),
    "other dims": to(where=[[0, [0], [260]]]),
    "negative": to(where=[[0, [-1, 0], [260, 3]]]),
    "in a circle": lambda found: found.update(children=["group-00000.json"] * 64),
    "elsewhere": lambda found: found.update(children=["../secret"]),
    "another shape": to(shape=[ROWS + 1, 3]),
    "another dtype": to(dtype="int32"),
}


@pytest.mark.parametrize("name", FORGED)
@pytest.mark.parametrize("file", ["manifest.json", "group-00000.json"])
def test_a_description_that_makes_no_sense_is_damage(manager: CheckpointManager, file: str, name: str) -> None:
    path = Path(manager.store.url) / "step-00000005" / file
    before = path.read_bytes()
    try:
        path.write_bytes(forged(path, FORGED[name]))

        def look() -> list[Damaged]:
            try:
                return list(manager.open(5).verify())
            except Damaged as damage:
                return [damage]

        assert look()
        with pytest.raises(Damaged):
            manager.open(5).tensor("model/w")
    finally:
        path.write_bytes(before)


def test_a_manifest_of_an_older_version_is_read(tmp_path: Path) -> None:
    """It has all chunks itself."""
    manager = CheckpointManager(Folder(tmp_path))
    manager.fence(1)
    for rank in range(2):
        shards = [("model/w", rows(2 * rank, 2), (4, 3), VALUE[2 * rank : 2 * rank + 2])]
        manager.write(1, 5, rank, shards, {"step": 5, "world": 2}, {})
    manager.commit(1, 5, 2, 5.0, lambda: False)
    new = manager.open(5)
    held = new.manifest.tensors["model/w"]
    old = Manifest(new.manifest.facts, {"model/w": Held(held.dtype, held.shape, held.hash)})
    old.tensors["model/w"].chunks = new.holding()["model/w"].chunks
    (tmp_path / "step-00000005" / MANIFEST).write_bytes(old.to_json())
    found = manager.open(5)
    assert isinstance(found, Checkpoint)
    assert found.manifest.children == {}
    assert torch.equal(found.tensor("model/w"), VALUE[:4])
    assert not list(found.verify())
    assert needed(found.manifest, {"model/w": [rows(0, 1)]}, "here") == []
