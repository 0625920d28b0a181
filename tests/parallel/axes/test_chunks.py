"""What a chunk's positions see: a mask for all blocks, or none where a kernel counts from the last key."""

from __future__ import annotations

import pytest
import torch

from phalanx import Layout
from phalanx.kernels.documents import are_starts
from phalanx.parallel.axes import chunks
from phalanx.parallel.axes.chunks import SequenceChunks
from tests.parity import TOLERANCE, HostileLanguage, Trace, difference, reference, spread_run
from tests.ranks import Ranks

CPU = torch.device("cpu")


def test_all_blocks_share_a_mask_for_each_chunk() -> None:
    made = SequenceChunks(4, CPU)
    for length in (16, 16, 32):
        made.prepare(length, torch.float32)
        every = [made.mask(index, torch.float32) for _ in range(3) for index in (1, 2)]
        assert len({id(mask) for mask in every}) == 2
        assert {len(mask.T) for mask in every} == {length // 2, 3 * length // 4}
    assert made.mask(1, torch.float64).dtype == torch.float64


def test_what_begins_the_sequence_needs_no_mask() -> None:
    made, narrow = SequenceChunks(4, CPU), torch.zeros(2, 1, 4, 8, dtype=torch.bfloat16)
    made.prepare(16, torch.bfloat16)
    assert made.seen(0, narrow, narrow) is None
    masked = made.seen(3, narrow, narrow)
    assert masked is not None
    assert masked.shape == (4, 16)
    made.by_kernel = True
    starts = made.seen(3, narrow, narrow)
    assert are_starts(starts)
    wide = narrow.double()
    assert not are_starts(made.seen(3, wide, wide))


def without_masks(layouts: list[str]) -> list[Trace]:
    """Steps in which chunks are attended to as a kernel would, by its twin."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "takes", lambda query, value: True)
        patch.setattr(SequenceChunks, "mask", None)
        patch.setattr(SequenceChunks, "by_kernel", property(lambda self: True, lambda self, value: None), raising=False)
        return [spread_run(HostileLanguage(steps=2), Layout.parse(layout)) for layout in layouts]


def test_causal_attention_without_masks_is_that_of_one_device(ranks: Ranks) -> None:
    layouts = ["cp=4", "cp=2,tp=2,recompute=full"]
    for layout, trace in zip(layouts, ranks(4, without_masks, layouts)[0], strict=True):
        error, where = difference(trace, reference(HostileLanguage(steps=2), 1))
        assert error < TOLERANCE, f"{layout}: {error:.1e} in {where}"
