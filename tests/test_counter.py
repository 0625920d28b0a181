"""The generator: keyed, the same whoever draws, and as random as it looks."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch

from phalanx import counter


def test_keys_depend_on_every_part_and_its_type() -> None:
    keys = [counter.key(1, "a"), counter.key(1, "b"), counter.key(2, "a"), counter.key("1", "a"), counter.key("1a")]
    assert len(set(keys)) == len(keys)
    assert counter.key(1, "a") == counter.key(1, "a")


def test_torch_and_numpy_mix_alike() -> None:
    x = np.arange(1000, dtype=np.uint64) * np.uint64(counter.GAMMA)
    assert (
        counter.mix(torch.from_numpy(x.view(np.int64).copy())).numpy().view(np.uint64) == counter.mix_array(x)
    ).all()


def test_an_element_does_not_depend_on_what_else_is_drawn() -> None:
    whole = counter.bits(7, torch.arange(100))
    assert torch.equal(counter.bits(7, torch.arange(40, 60)), whole[40:60])
    keys = torch.tensor([3, 5])
    wide, narrow = counter.grid_bits(keys, (4, 9)), counter.grid_bits(keys, (3, 5))
    assert torch.equal(wide[:, :3, :5], narrow), "padding a sample longer changed its numbers"
    mask, shorter = counter.keep_mask(keys, (4, 9), 0.5), counter.keep_mask(keys, (4, 6), 0.5)
    assert torch.equal(mask[:, :, :6], shorter)


@pytest.mark.parametrize("shape", [(7,), (6, 5), (5, 6), (4, 3, 5)])
def test_words_of_a_box_are_those_of_the_whole(shape: tuple[int, ...]) -> None:
    """Also where a cut parts two neighbours that have the halves of one draw."""
    cpu = torch.device("cpu")
    whole = counter.box_words(7, shape, ((0,) * len(shape), shape), cpu)
    pairs = counter.bits(7, torch.arange((whole.numel() + 1) // 2)).view(torch.int32)
    assert torch.equal(whole.view(-1), pairs[: whole.numel()])
    for axis in range(len(shape)):
        for first, start in product(range(shape[0]), range(shape[axis])):
            sizes, offsets = list(shape), [0] * len(shape)
            offsets[0], sizes[0] = first, shape[0] - first
            if axis:
                offsets[axis], sizes[axis] = start, min(2, shape[axis] - start)
            part = whole
            for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                part = part.narrow(dim, offset, size)
            assert torch.equal(counter.box_words(7, sizes, (offsets, shape), cpu), part)
    assert counter.box_words(7, (), ((), ()), cpu) == whole.view(-1)[0]


def test_streams_under_a_key_differ_and_are_mixed_as_tensors_are() -> None:
    streams = [counter.nth(5, number) for number in range(100)]
    keys = torch.tensor([5 + counter.call_offset(number) for number in range(100)])
    assert streams == counter.mix(keys).tolist()
    assert len(set(streams)) == 100


def test_uniforms_are_uniform_and_normals_normal() -> None:
    count = 200_000
    uniform = counter.fill_uniform(torch.empty(count, dtype=torch.float64), 1, -2.0, 3.0)
    assert uniform.min() >= -2
    assert uniform.max() < 3
    histogram = torch.histc(uniform, 20, -2, 3) / count
    assert ((histogram - 0.05).abs() < 5 * math.sqrt(0.05 / count)).all()
    normal = counter.fill_normal(torch.empty(count, dtype=torch.float64), 2, 1.0, 2.0)
    assert abs(normal.mean() - 1) < 5 * 2 / math.sqrt(count)
    assert abs(normal.std() - 2) < 5 * 2 / math.sqrt(2 * count)
    standard = (normal - 1) / 2
    assert abs((standard**4).mean() - 3) < 0.1
    assert abs((standard[:-1] * standard[1:]).mean()) < 5 / math.sqrt(count), "neighbours are correlated"


def test_masks_drop_the_fraction_asked_for() -> None:
    for drop in (0.1, 0.5, 0.9):
        mask = counter.keep_mask(torch.arange(100), (999,), drop)
        assert abs(mask.double().mean() - (1 - drop)) < 5 * math.sqrt(drop * (1 - drop) / mask.numel())
        assert (mask[0] != mask[1]).any()


def test_filling_in_chunks_and_out_of_order_is_the_same(monkeypatch) -> None:
    whole = counter.fill_normal(torch.empty(3, 50), 9, 0.0, 1.0)
    monkeypatch.setitem(counter.CHUNK, "cpu", 7)
    assert torch.equal(counter.fill_normal(torch.empty(3, 50), 9, 0.0, 1.0), whole)
    transposed = torch.empty(50, 3).t()
    assert torch.equal(counter.fill_normal(transposed, 9, 0.0, 1.0), whole)


@pytest.mark.parametrize("fill", [counter.fill_normal, counter.fill_uniform])
def test_a_box_is_drawn_as_it_is_in_the_whole(fill, monkeypatch) -> None:
    whole = fill(torch.empty(6, 5, 8), 9, -1.0, 1.0)
    for offsets, sizes in [
        ((0, 0, 0), (6, 5, 8)),
        ((2, 0, 0), (3, 5, 8)),
        ((1, 2, 0), (4, 2, 8)),
        ((5, 1, 3), (1, 4, 2)),
    ]:
        for chunk in (1 << 16, 16, 3):
            monkeypatch.setitem(counter.CHUNK, "cpu", chunk)
            part = fill(torch.empty(sizes), 9, -1.0, 1.0, (offsets, whole.shape))
            box = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
            assert torch.equal(part, whole[box])
    assert fill(torch.empty(0, 5, 8), 9, -1.0, 1.0, ((3, 0, 0), whole.shape)).numel() == 0


def test_bits_do_not_depend_on_where_a_draw_begins() -> None:
    """Kernels compute neighbours together: an element at the end of a run, or of another, must come out the same."""
    whole = counter.fill_normal(torch.empty(1 << 18, dtype=torch.float64), 3, 0.0, 1.0)
    for start, size in [(1, 65_535), (7, 100_003), (65_530, 13), (12_345, 1), (9, 31)]:
        part = torch.empty(size, dtype=torch.float64)
        assert torch.equal(counter.fill_normal(part, 3, 0.0, 1.0, ((start,), whole.shape)), whole[start : start + size])


def test_a_compiled_program_has_the_very_number_of_a_call() -> None:
    """An expression of more than 64 bits is none that every compiler can write."""
    graphs: list[torch.fx.GraphModule] = []

    def kept(graph: torch.fx.GraphModule, inputs: list[object]) -> object:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x, number: x + counter.call_offset(number), backend=kept, dynamic=True)
    x = torch.zeros(3, dtype=torch.int64)
    for number in (2, 3, 300):
        assert compiled(x, number).tolist() == [counter.call_offset(number)] * 3
    for graph in graphs[:2]:
        [added] = [node for node in graph.graph.nodes if node.op == "call_function"]
        assert isinstance(added.args[1], int)


def test_offsets_of_calls_go_on_behind_the_table() -> None:
    last = len(counter.OFFSETS)
    steps = [counter.call_offset(number + 1) - counter.call_offset(number) for number in range(last - 2, last + 2)]
    assert {step % (1 << 64) for step in steps} == {counter.CALL}
