"""A weight and the rows of it that a rank owns."""

from __future__ import annotations

from tests.parallel.weights.test_packing import weights


def test_pieces_keep_their_dims_and_share_memory_where_they_can() -> None:
    weight = weights(2, 1, [(5, 3)])[0]
    assert weight.shard.shape == (2, 3)
    weight.shard.data.fill_(7)
    assert (weight.full.data[3:] == 7).all()
    alone = weights(1, 0, [(5, 3)])[0]
    assert alone.shard is alone.full
    assert alone.shard.logical_name == "w0"
