"""Documents of different lengths put into samples of one length, none of them cut in two: best fit, longest first.

Which documents share a sample follows from their lengths and their order alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def best_fit(lengths: Sequence[int], length: int) -> list[list[int]]:
    """By sample, the numbers of its documents, in order. None may be longer than a sample."""
    open_by_room: list[list[int]] = [[] for _ in range(length + 1)]
    has_room = np.zeros(length + 1, dtype=bool)
    samples: list[list[int]] = []
    for document in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        size = lengths[document]
        room = size + int(has_room[size:].argmax())
        if has_room[room]:
            sample = open_by_room[room].pop()
            has_room[room] = bool(open_by_room[room])
        else:
            room, sample = length, len(samples)
            samples.append([])
        samples[sample].append(document)
        if left := room - size:
            open_by_room[left].append(sample)
            has_room[left] = True
    return [sorted(documents) for documents in samples]
