"""Writing a rank's part of a checkpoint: one safetensors file of checksummed chunks, and what it holds beside it.

`PartWriter` is a storage writer of torch.distributed.checkpoint, which each rank runs by itself: what a rank writes
follows from the layout, so that nobody needs to be asked and a save in the background sends nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from phalanx.checkpoint.hashing import hashed
from phalanx.checkpoint.manifest import Chunk, Damaged, Held, Manifest, unreadable
from phalanx.checkpoint.slot import Staged, StagedEntry
from phalanx.checkpoint.store import Store
from phalanx.checkpoint.weights import header, raw_bytes
from phalanx.parallel.weights.boxes import Box

CHUNK_BYTES = 16 << 20
"""Small enough to be read for a part of it, large enough for a disk."""
READ_BACK = 8
"""So many chunks of a part are read again before anybody relies on it."""

Piece = tuple[str, Box, tuple[int, ...], Tensor]
"""Name, box, shape of the whole, value."""


def shards(staged: Staged) -> Iterator[Piece]:
    """What a rank writes of its staged copy, in chunks."""
    return pieces((place, tensor) for place, tensor in staged.tensors if place.written)


def pieces(found: Iterable[tuple[StagedEntry, Tensor]]) -> Iterator[Piece]:
    """Staged entries, in chunks."""
    for place, tensor in found:
        for box, view in _chunks(place.box, tensor):
            yield place.name, box, place.shape, view


def _chunks(box: Box, tensor: Tensor) -> Iterator[tuple[Box, Tensor]]:
    size = tensor.numel() * tensor.element_size()
    if size <= CHUNK_BYTES or tensor.ndim == 0 or len(tensor) < 2:
        yield box, tensor
        return
    rows = max(1, CHUNK_BYTES * len(tensor) // size)
    for start in range(0, len(tensor), rows):
        stop = min(start + rows, len(tensor))
        yield box.rows(start, stop), tensor[start:stop]


class PartWriter(dcp.StorageWriter):
    """One rank's file in a checkpoint's folder."""

    def __init__(self, store: Store, folder: str, rank: int) -> None:
        self.store, self.folder, self.name = store, folder, f"part-{rank:05d}"
        self.tensors: dict[str, Held] = {}

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        values = [(item, value) for item in plan.items if isinstance(value := planner.resolve_data(item), Tensor)]
        begin = _beginning([(item.index.fqn, _box(item), value.dtype) for item, value in values])
        file, start = f"{self.name}.safetensors", len(begin)
        with self.store.write(f"{self.folder}/{file}") as out:
            out.write(begin)
            for item, value in values:
                content = raw_bytes(value)
                out.write(content)
                chunk = Chunk(item.index.fqn, _box(item), file, start, len(content), zlib.crc32(content))
                self._note(item, value, chunk)
                start += len(content)
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, 0, None) for item, _ in values])
        return done

    def _note(self, item: WriteItem, value: Tensor, chunk: Chunk) -> None:
        assert item.tensor_data is not None
        shape = tuple(item.tensor_data.size)
        held = self.tensors.setdefault(chunk.tensor, Held(str(value.dtype).removeprefix("torch."), shape))
        held.chunks.append(chunk)
        held.hash = (held.hash + hashed(value, chunk.box, shape)) % (1 << 64)

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        return plans

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class GivenPlanner(dcp.SavePlanner):
    """A plan made of pieces whose places are known."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.values: dict[MetadataIndex, Tensor] = {}
        self.items = []
        for name, box, shape, value in state_dict["pieces"]:
            index = MetadataIndex(name, torch.Size(box.offsets))
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            data = TensorWriteData(chunk, TensorProperties(dtype=value.dtype), torch.Size(shape))
            self.items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
            self.values[index] = value

    def create_local_plan(self) -> dcp.SavePlan:
        return dcp.SavePlan(self.items)

    def create_global_plan(self, all_plans: list[dcp.SavePlan]) -> tuple[list[dcp.SavePlan], Metadata]:
        return all_plans, Metadata({})

    def finish_plan(self, new_plan: dcp.SavePlan) -> dcp.SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.values[write_item.index]


def write_part(
    store: Store, folder: str, rank: int, given: Iterable[Piece], facts: dict[str, Any], numbers: dict[str, Any]
) -> Manifest:
    """Write a rank's part into an unfinished checkpoint's folder; on disk, and read back, when this returns."""
    part = PartWriter(store, folder, rank)
    try:
        dcp.save({"pieces": given}, storage_writer=part, planner=GivenPlanner(), no_dist=True)
    except dcp.CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, OSError):
                raise cause from None
        raise
    manifest = Manifest(facts, part.tensors, numbers)
    chunks = chunks_of(manifest)
    check_file(store, f"{folder}/{part.name}.safetensors", manifest)
    for chunk in chunks[:: max(1, len(chunks) // READ_BACK)]:
        name = f"{folder}/{chunk.file}"
        chunk.checked(store.read(name, chunk.start, chunk.start + chunk.length), f"{store.url}/{name}")
    with store.write(f"{folder}/{part.name}.json") as file:
        file.write(manifest.to_json())
    return manifest


def chunks_of(part: Manifest) -> list[Chunk]:
    """As they lie in the part's file, one after another."""
    return sorted((chunk for held in part.tensors.values() for chunk in held.chunks), key=lambda chunk: chunk.start)


def check_file(store: Store, file: str, part: Manifest) -> None:
    """Whether a part's file begins as it must for others to read it, and is as long; its chunks have their own sums."""
    chunks = chunks_of(part)
    begin = _beginning([(c.tensor, c.box, getattr(torch, part.tensors[c.tensor].dtype)) for c in chunks])
    try:
        size, found = store.size(file), store.read(file, 0, len(begin))
    except OSError as error:
        raise unreadable(f"{store.url}/{file}", error) from None
    if size != len(begin) + part.size:
        raise Damaged(f"{store.url}/{file}", f"has {size:,} bytes, and {len(begin) + part.size:,} were written")
    if found != begin:
        raise Damaged(f"{store.url}/{file}", "has changed since it was written: its header is another")


def _beginning(described: Iterable[tuple[str, Box, torch.dtype]]) -> bytes:
    """The header of a part's file, in which each chunk is named after its tensor and its place there."""
    named = []
    for name, box, dtype in described:
        place = ",".join(f"{a}:{a + n}" for a, n in zip(box.offsets, box.sizes, strict=True))
        named.append((f"{name}[{place}]", dtype, box.sizes))
    return header(named, {"format": "pt"})


def _box(item: WriteItem) -> Box:
    assert item.tensor_data is not None
    return Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))
