"""Where packed documents begin: found from ids or positions, cut into chunks, and the mask that says the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.kernels import documents as kernel_documents
from phalanx.kernels.documents import (
    FEWEST,
    POSITIONS,
    are_starts,
    cumulative,
    dense_mask,
    one_document,
    remember,
    restart,
    starts_of,
)

IDS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [5, 3, 3, 3, 3, 3, -1, -1]])
PLACES = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [7, 0, 1, 2, 3, 4, 0, 1]])


def by_hand(ids: Tensor, causal: bool) -> Tensor:
    rows = [
        [[bool(one == other) and (not causal or j <= i) for j, other in enumerate(row)] for i, one in enumerate(row)]
        for row in ids.tolist()
    ]
    return torch.tensor(rows).unsqueeze(1)


def test_ids_and_positions_tell_the_same() -> None:
    found = starts_of(IDS)
    assert found is not None
    assert are_starts(found)
    assert found.shape == (2, 1, 1, FEWEST)
    assert found[:, 0, 0, :4].tolist() == [[0, 3, 5, 8], [0, 1, 6, 8]]
    other = starts_of(PLACES, POSITIONS)
    assert other is not None
    assert torch.equal(found, other)
    assert restart(PLACES)
    assert not restart(torch.arange(8).expand(2, -1))


def test_what_cannot_be_told_so() -> None:
    """A document that goes on after another one, documents without number, and tensors without values."""
    assert starts_of(torch.tensor([[0, 1, 0]])) is None
    assert starts_of(torch.arange(1000).unsqueeze(0)) is None
    assert starts_of(torch.nn.Parameter(IDS.float(), requires_grad=False)) is None
    assert not are_starts(IDS)
    assert not are_starts(None)


def test_slots_double_where_a_batch_needs_them() -> None:
    found = starts_of(torch.arange(20).repeat_interleave(10).unsqueeze(0))
    assert found is not None
    assert found.shape[-1] == 2 * FEWEST


def test_a_batch_on_a_gpu_is_looked_at_on_the_host() -> None:
    placed = remember(torch.zeros_like(IDS), IDS)  # as if it had not arrived yet
    found = starts_of(placed)
    assert found is not None
    assert found[0, 0, 0, :3].tolist() == [0, 3, 5]
    placed.add_(0)  # written to since: the host's copy is another one
    found = starts_of(placed)
    assert found is not None
    assert found[0, 0, 0, :2].tolist() == [0, IDS.shape[1]]


def test_a_recorded_step_knows_nothing_of_the_next_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its documents are kept apart by what the device computes of them."""
    monkeypatch.setattr(kernel_documents, "is_recorded", lambda column: True)
    assert starts_of(IDS) is None
    assert restart(torch.arange(8).expand(2, -1))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("first", "queries"), [(0, 8), (3, 2), (4, 4), (0, 1)])
def test_the_mask_of_a_chunk(causal: bool, first: int, queries: int) -> None:
    starts = starts_of(IDS)
    assert starts is not None
    expected = by_hand(IDS, causal)[:, :, first : first + queries]
    assert torch.equal(dense_mask(starts, first, queries, 8, causal), expected)
    assert torch.equal(dense_mask(starts, first, queries, first + queries, causal), expected[..., : first + queries])


def test_all_blocks_share_a_mask() -> None:
    starts = starts_of(IDS)
    assert starts is not None
    assert dense_mask(starts, 0, 8, 8, True) is dense_mask(starts, 0, 8, 8, True)
    assert not torch.equal(dense_mask(starts, 0, 8, 8, False), dense_mask(starts, 0, 8, 8, True))


def test_cumulative_lengths_of_a_chunk() -> None:
    starts = torch.tensor([[0, 3, 5, 8], [0, 1, 6, 8]], dtype=torch.int32).view(2, 1, 1, 4)
    assert cumulative(starts, 0, 8).tolist() == [0, 3, 5, 8, 8, 9, 14, 16, 16]
    assert cumulative(starts, 4, 3).tolist() == [0, 0, 1, 3, 3, 3, 5, 6, 6]
    assert cumulative(one_document(2, torch.device("cpu")), 4, 3).tolist() == [0, 3, 6]
