"""Best fit: every document once, none cut, few samples."""

from __future__ import annotations

import numpy as np

from phalanx.data.best_fit import best_fit


def test_every_document_is_in_one_sample_and_fits() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, size=500).tolist()
    samples = best_fit(lengths, 128)
    assert sorted(number for sample in samples for number in sample) == list(range(500))
    used = [sum(lengths[number] for number in sample) for sample in samples]
    assert max(used) <= 128
    assert sum(used) / (128 * len(samples)) > 0.95
    assert samples == best_fit(lengths, 128)


def test_the_smallest_room_that_fits_is_taken() -> None:
    assert best_fit([7, 6, 3, 2], 10) == [[0, 2], [1, 3]]
    assert best_fit([10, 10], 10) == [[0], [1]]
