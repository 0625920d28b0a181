"""Reading: any boxes from any chunks, by our planner and by torch's own, and never what is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from phalanx.checkpoint.manifest import Chunk, Damaged, Held
from phalanx.checkpoint.read import Chunks, Wanted, read
from phalanx.parallel.weights.boxes import Box
from tests.checkpoints import contents, newest, trained
from tests.parity import HostileLanguage
from tests.ranks import Ranks

WHOLE = torch.arange(35.0).view(7, 5)


def held() -> tuple[dict[str, Held], dict[tuple[int, ...], Tensor]]:
    """In four chunks of unequal size, and a number."""
    boxes = [Box((r, c), (h, w)) for r, h in ((0, 3), (3, 4)) for c, w in ((0, 2), (2, 3))]
    chunks = [Chunk("w", box, "", 0, 0, 0) for box in boxes]
    values = {b.offsets: WHOLE[b.offsets[0] :, b.offsets[1] :][: b.sizes[0], : b.sizes[1]] for b in boxes}
    number = Held("float32", (), 0, [Chunk("n", Box((), ()), "", 0, 0, 0)])
    return {"w": Held("float32", (7, 5), 0, chunks), "n": number}, values | {(): torch.tensor(8.0)}


def test_boxes_are_filled_from_the_chunks_that_they_meet() -> None:
    tensors, values = held()
    fetched: list[tuple[int, ...]] = []

    def fetch(chunk: Chunk) -> Tensor:
        fetched.append(chunk.box.offsets)
        return values[chunk.box.offsets]

    rows, corner, number = torch.zeros(3, 5), torch.zeros(2, 2), torch.zeros(())
    wanted = {"w": [(Box((2, 0), (3, 5)), rows), (Box((0, 0), (2, 2)), corner)], "n": [(Box((), ()), number)]}
    read(tensors, fetch, Wanted(wanted))
    assert torch.equal(rows, WHOLE[2:5])
    assert torch.equal(corner, WHOLE[:2, :2])
    assert number == 8
    assert len(fetched) == len(set(fetched)), "each chunk is fetched once"
    fetched.clear()
    read(tensors, fetch, Wanted({"w": [(Box((4, 3), (1, 1)), torch.zeros(1, 1))]}))
    assert fetched == [(3, 2)], "and none that is not needed"


def test_several_tensors_are_joined_in_one_place() -> None:
    """Two of three rows each, in chunks of their own: what is read is added, part by part."""
    tensors, values = held()
    tensors["v"] = Held("float32", (7, 5), 0, [Chunk("v", chunk.box, "", 0, 0, 0) for chunk in tensors["w"].chunks])
    room = torch.full((3, 5), 100.0)
    wanted = Wanted({name: [(Box((2, 0), (3, 5)), room)] for name in ("w", "v")})
    wanted.joins = {"w": Tensor.add_, "v": Tensor.sub_}
    read(tensors, lambda chunk: values[chunk.box.offsets] * (1 if chunk.tensor == "w" else 3), wanted)
    assert torch.equal(room, 100 - 2 * WHOLE[2:5])


def test_damage_is_told_as_it_is() -> None:
    def fetch(chunk: Chunk) -> Tensor:
        raise Damaged("here", "is cut short")

    with pytest.raises(Damaged, match="here is cut short"):
        read(held()[0], fetch, Wanted({"w": [(Box((0, 0), (7, 5)), torch.zeros(7, 5))]}))


def by_torch(folder: Path) -> bool:
    """torch.distributed.checkpoint.load with its own planner: into plain tensors, and into DTensors."""
    checkpoint, expected = newest(folder), contents(folder)
    reader = Chunks(checkpoint.holding(), checkpoint.fetch)
    plain = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(plain, storage_reader=reader)
    mesh = init_device_mesh("cpu", (2,))
    spread = {
        name: distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(0) if tensor.ndim else Replicate()])
        for name, tensor in expected.items()
    }
    dcp.load(spread, storage_reader=reader)
    whole = {name: tensor.full_tensor() for name, tensor in spread.items()}
    return all(torch.equal(plain[n], value) and torch.equal(whole[n], value) for n, value in expected.items())


def test_torch_reads_it_too(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4, trained, HostileLanguage(), "fsdp=2,tp=2", tmp_path, None, 1)
    assert ranks(2, by_torch, tmp_path) == [True, True]
