"""Reading saved tensors into a rank's own: torch.distributed.checkpoint finds which chunks a rank needs parts of.

`Chunks` is a storage reader of torch's, so that `torch.distributed.checkpoint.load` reads these checkpoints into any
model, with torch's own planner too. Each chunk is checked when it is read, which torch's own storage does not do, and
nothing is ever unpickled.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from phalanx.checkpoint.manifest import Chunk, Damaged, Held
from phalanx.parallel.weights.boxes import Box

Fetch = Callable[[Chunk], Tensor]
Join = Callable[[Tensor, Tensor], object]
"""Puts what was read to what is there."""
warnings.filterwarnings(
    "ignore", "torch.distributed is disabled, unavailable"
)  # ranks save and load alone: it is meant


class Wanted(dict[str, list[tuple[Box, Tensor]]]):
    """By saved tensor, the boxes of it that a rank wants, and where each goes."""

    def __init__(self, places: Mapping[str, list[tuple[Box, Tensor]]] | None = None) -> None:
        super().__init__(places or {})
        self.joins: dict[str, Join] = {}
        """By name, how it is put to what is there, where it does not take its place: several may go to one place."""


class Chunks(dcp.StorageReader):
    """Tensors as chunks, from wherever ``fetch`` gets them."""

    def __init__(self, tensors: Mapping[str, Held], fetch: Fetch) -> None:
        self.tensors, self.fetch = tensors, fetch
        self._chunks = {
            MetadataIndex(name, torch.Size(chunk.box.offsets)): chunk
            for name, held in tensors.items()
            for chunk in held.chunks
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=getattr(torch, held.dtype)),
                    torch.Size(held.shape),
                    [_storage(chunk.box) for chunk in held.chunks],
                )
                for name, held in self.tensors.items()
            }
        )

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        by_chunk: dict[MetadataIndex, list[Any]] = {}
        for item in plan.items:
            index = MetadataIndex(item.storage_index.fqn, item.storage_index.offset)
            by_chunk.setdefault(index, []).append(item)
        for index, items in by_chunk.items():
            chunk = self.fetch(self._chunks[index])
            for item in items:
                part = chunk
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    part = part.narrow(dim, start, length)
                target = planner.resolve_tensor(item)
                target.detach().copy_(part)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: dcp.LoadPlan) -> dcp.LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class Boxes(dcp.LoadPlanner):
    """Into a rank's boxes of plain tensors. torch's own planner would want DTensors, which have no uneven spans."""

    def __init__(self, joins: Mapping[str, Join]) -> None:
        self.joins = joins

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self.wanted, self.metadata = state_dict, metadata.state_dict_metadata
        self._views = {(name, box.offsets): view for name, parts in state_dict.items() for box, view in parts}

    def create_local_plan(self) -> dcp.LoadPlan:
        items = []
        for name, parts in self.wanted.items():
            held = self.metadata[name]
            assert isinstance(held, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, held, [_storage(box) for box, _ in parts])
        return dcp.LoadPlan(items)

    def create_global_plan(self, global_plan: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: dcp.LoadPlan) -> dcp.LoadPlan:
        return central_plan

    def resolve_tensor(self, read_item: Any) -> Tensor:
        place = self._place(read_item)
        return torch.empty_like(place) if read_item.dest_index.fqn in self.joins else place

    def _place(self, read_item: Any) -> Tensor:
        view = self._views[read_item.dest_index.fqn, tuple(read_item.dest_index.offset)]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, start, length)
        return view

    def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
        if (join := self.joins.get(read_item.dest_index.fqn)) is not None:
            join(self._place(read_item), tensor)

    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise AssertionError("there is nothing here but tensors")


def read(tensors: Mapping[str, Held], fetch: Fetch, wanted: Wanted) -> None:
    """Fill this rank's boxes. No other rank is spoken to."""
    try:
        dcp.load(dict(wanted), storage_reader=Chunks(tensors, fetch), planner=Boxes(wanted.joins), no_dist=True)
    except dcp.CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, (Damaged, OSError)):
                raise cause from None
        raise


def _storage(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
