from __future__ import annotations

import torch

from phalanx.parallel.communication.codecs.owed import Owed, turn


def test_what_is_owed_changes_when_a_step_counts() -> None:
    owed = Owed((2, 3), torch.float32, torch.device("cpu"))
    saved = owed.now
    before, after = owed.turn()
    assert before.data_ptr() == saved.data_ptr() != after.data_ptr()
    after.fill_(1)
    again, still = owed.turn()
    assert again.data_ptr() == still.data_ptr() == after.data_ptr()  # a second micro-batch goes on from the first
    assert not owed.now.any()
    owed.end_step(counts=True, factor=2.0)
    assert torch.equal(owed.now, torch.full((2, 3), 2.0))


def test_a_step_that_is_left_out_changes_nothing() -> None:
    owed = Owed((4,), torch.float32, torch.device("cpu"))
    owed.turn()[1].fill_(torch.nan)
    owed.end_step(counts=False, factor=1.0)
    assert not owed.now.any()
    owed.end_step(counts=True, factor=1.0)  # a step without gradients
    assert not owed.now.any()


def test_nothing_is_owed_where_nothing_can_be() -> None:
    assert turn(None) == (None, None)
