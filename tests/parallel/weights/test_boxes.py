"""Boxes: every element of a weight lies in just one rank's, where it lies in the whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx.parallel.axes.cuts import Cut
from phalanx.parallel.communication.copying import Copying
from phalanx.parallel.communication.memory import Buffers
from phalanx.parallel.weights.boxes import Box, boxes, locate, segments
from phalanx.parallel.weights.storage import Storage
from phalanx.parallel.weights.weight import Weight


def weight(value: torch.Tensor, ranks: int, rank: int) -> Weight:
    cpu, kind = torch.device("cpu"), torch.float32
    storage = Storage(ranks, rank, None, kind, kind, kind, cpu, cpu, Buffers(cpu), Copying(cpu), False, False)
    made = Weight("w", nn.Parameter(value), value.shape, [], storage)
    made.make_room()
    made.shard.data.copy_(made.own_rows(value))
    return made


CUTS = {
    "none": None,
    "rows": Cut(0, (((0, 4),), ((4, 7),))),
    "columns": Cut(1, (((0, 2),), ((2, 5),))),
    "joined rows": Cut(0, (((0, 2), (4, 6)), ((2, 4), (6, 7)))),
    "joined columns": Cut(1, (((0, 1), (3, 4)), ((1, 3), (4, 5)))),
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("name", CUTS)
def test_every_element_is_in_one_box(name: str, ranks: int) -> None:
    whole, cut = torch.arange(70.0).view(7, 5, 2), CUTS[name]
    found, times = torch.zeros_like(whole), torch.zeros_like(whole)
    for index in range(2 if cut else 1):
        part = cut.take(whole, index) if cut else whole
        for rank in range(ranks):
            held = weight(part, ranks, rank)
            for box, view in boxes(held, cut, index, held.shard.data):
                assert tuple(view.shape) == box.sizes
                place = tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
                found[place] = view
                times[place] += 1
    assert torch.equal(found, whole)
    assert times.eq(1).all()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", CUTS)
def test_segments_are_where_elements_lie_in_the_whole(name: str, ranks: int) -> None:
    whole, cut = torch.arange(70).view(7, 5, 2), CUTS[name]
    for index in range(2 if cut else 1):
        part = cut.take(whole, index) if cut else whole
        for rank in range(ranks):
            held = weight(part.float(), ranks, rank)
            locate(held, cut, index, whole.shape)
            places = torch.full((held.shard.numel(),), -1)
            for each in segments(held.shard.shape, held.shard.logical_boxes, held.shard.logical_shape):
                at = torch.arange(each.size)
                there = at // each.length * each.apart + at % each.length if each.length else at
                places[each.start : each.start + each.size] = each.first + there
            assert places.tolist() == held.shard.view(-1).int().tolist()


def test_views_are_the_piece_itself() -> None:
    held = weight(torch.zeros(4, 3), 2, 1)
    for _, view in boxes(held, None, 0, held.shard.data):
        view.fill_(3)
    assert held.shard.eq(3).all()


def test_one_number_is_a_box_without_sides() -> None:
    value = torch.tensor(4.0)
    found = [list(boxes(held, None, 0, held.shard.data)) for held in (weight(value, 2, rank) for rank in range(2))]
    assert [box for box, _ in found[0]] == [Box((), ())]
    assert found[0][0][1].shape == ()
    assert found[1] == []


def test_rows_of_a_box() -> None:
    assert Box((2, 1), (5, 3)).rows(1, 4) == Box((3, 1), (3, 3))
    assert Box.whole(torch.zeros(2, 3)) == Box((0, 0), (2, 3))
