"""Tables of where tensors lie: every element is in one program's span, and a table is made again when that changes."""

from __future__ import annotations

import torch

from phalanx.kernels.tables import Tables, spans_of


def test_every_element_is_in_one_span() -> None:
    sizes = [5, 0, 8, 17]
    seen = [(which, span * 8 + at) for which, span in spans_of(sizes, 8).tolist() for at in range(8)]
    inside = [(which, at) for which, at in seen if at < sizes[which]]
    assert sorted(inside) == [(which, at) for which, size in enumerate(sizes) for at in range(size)]


def test_tables_are_kept_until_something_moves() -> None:
    tables, device = Tables(), torch.device("cpu")
    rows, spans = tables.told("a", [(10, 8), (20, 9)], [8, 9], 8, device)
    again = tables.told("a", [(10, 8), (20, 9)], [8, 9], 8, device)
    assert again[0] is rows
    assert again[1] is spans
    moved = tables.told("a", [(10, 8), (30, 9)], [8, 9], 8, device)
    assert moved[0].tolist() == [[10, 8], [30, 9]]
    assert moved[1] is spans
    other = tables.told("b", [(10, 17)], [17], 8, device)
    assert other[1].tolist() == [[0, 0], [0, 1], [0, 2]]
    assert tables.told("a", [(10, 8), (30, 9)], [8, 9], 8, device)[0] is moved[0]
