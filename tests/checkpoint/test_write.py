"""A rank's part of a checkpoint: one file that any safetensors reader reads, in chunks, read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from phalanx.checkpoint import write
from phalanx.checkpoint.manifest import Damaged, Manifest
from phalanx.checkpoint.slot import Staged, StagedEntry
from phalanx.checkpoint.store import Folder
from phalanx.checkpoint.write import Piece, check_file, shards, write_part
from phalanx.parallel.weights.boxes import Box

MATRIX, NUMBER = torch.arange(21.0).view(7, 3), torch.tensor(5)
PIECES: list[Piece] = [
    ("model/w", Box((2, 0), (7, 3)), (9, 3), MATRIX),
    ("counters/step/w", Box((), ()), (), NUMBER),
]


def test_a_part_is_a_safetensors_file(tmp_path: Path) -> None:
    manifest = write_part(Folder(tmp_path), "new", 3, PIECES, {"step": 1}, {"n": 2})
    found = load_file(tmp_path / "new" / "part-00003.safetensors")
    assert found.keys() == {"model/w[2:9,0:3]", "counters/step/w[]"}
    assert torch.equal(found["model/w[2:9,0:3]"], MATRIX)
    assert torch.equal(found["counters/step/w[]"], NUMBER)
    said = Manifest.parse((tmp_path / "new" / "part-00003.json").read_bytes(), "")
    assert said == manifest
    assert said.tensors["model/w"].shape == (9, 3)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["part-00003.json", "part-00003.safetensors"]


def test_what_is_large_is_written_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "CHUNK_BYTES", 30)  # two rows
    places = [(StagedEntry("model/w", Box((2, 0), (7, 3)), (9, 3), "float32", 0, True), MATRIX),
              (StagedEntry("model/v", Box((0, 0), (7, 3)), (7, 3), "float32", 0, False), MATRIX)]  # fmt: skip
    found = list(shards(Staged({"step": 1}, {}, places)))
    assert [(name, box.offsets, box.sizes) for name, box, _, _ in found] == [
        ("model/w", (2 + start, 0), (min(2, 7 - start), 3)) for start in range(0, 7, 2)
    ]
    assert torch.equal(torch.cat([view for *_, view in found]), MATRIX)
    in_chunks = write_part(Folder(tmp_path), "a", 0, found, {}, {}).tensors["model/w"]
    at_once = write_part(Folder(tmp_path), "b", 0, PIECES, {}, {}).tensors["model/w"]
    assert len(in_chunks.chunks) == 4
    assert in_chunks.hash == at_once.hash


def test_a_part_is_read_back_before_anybody_relies_on_it(tmp_path: Path) -> None:
    class Forgetful(Folder):
        def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
            found = super().read(name, start, stop)
            return bytes(len(found)) if start else found

    with pytest.raises(Damaged, match=r"new/part-00000\.safetensors has changed since it was written: .* of model/w"):
        write_part(Forgetful(tmp_path), "new", 0, PIECES, {}, {})
    assert not (tmp_path / "new" / "part-00000.json").exists()


def test_an_error_of_the_disk_is_told_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensor: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write, "raw_bytes", full)
    with pytest.raises(OSError, match="No space left on device"):
        write_part(Folder(tmp_path), "new", 0, PIECES, {}, {})
    assert list((tmp_path / "new").iterdir()) == []


def test_a_file_must_begin_and_end_as_written(tmp_path: Path) -> None:
    store = Folder(tmp_path)
    part = write_part(store, "new", 0, PIECES, {}, {})
    path = tmp_path / "new" / "part-00000.safetensors"
    good = path.read_bytes()
    for content, words in (
        (good[:20] + b"?" + good[21:], "its header is another"),
        (good + b"!", rf"has {len(good) + 1} bytes, and {len(good)} were written"),
        (good[:-1], rf"has {len(good) - 1} bytes"),
    ):
        path.write_bytes(content)
        with pytest.raises(Damaged, match=words):
            check_file(store, "new/part-00000.safetensors", part)
