"""A sample of packed documents: targets stay in their document, and positions begin anew with each."""

from __future__ import annotations

import numpy as np

from phalanx.data.packing import packed


def test_documents_end_inside_and_at_the_end() -> None:
    sample = packed(np.arange(10, 16), np.array([2, 5]), 5)
    assert sample["tokens"].tolist() == [10, 11, 12, 13, 14]
    assert sample["targets"].tolist() == [11, -100, 13, 14, -100]
    assert sample["documents"].tolist() == [0, 0, 1, 1, 1]
    assert sample["positions"].tolist() == [0, 1, 0, 1, 2]


def test_the_last_sample_is_filled_up() -> None:
    sample = packed(np.array([7, 8, 9]), np.array([3]), 4, pad=1)
    assert sample["tokens"].tolist() == [7, 8, 1, 1]
    assert sample["targets"].tolist() == [8, 9, -100, -100]
    assert sample["documents"].tolist() == [0, 0, -1, -1]
