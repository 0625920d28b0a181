"""The stream among what a block is called with."""

from __future__ import annotations

import pytest
import torch

from phalanx import WrongUse
from phalanx.parallel.forward.calls import stream, with_stream

X, MASK = torch.zeros(2, 3, 4), torch.zeros(3, 3)


def test_the_first_tensor_is_the_stream() -> None:
    assert stream((None, X), {"mask": MASK}, "b") is X
    assert stream((), {"mask": None, "x": X}, "b") is X
    other = torch.ones(2, 1, 4)
    args, kwargs = with_stream((None, X, MASK), {"mask": MASK}, other)
    assert args[1] is other
    assert args[2] is kwargs["mask"] is MASK
    args, kwargs = with_stream((), {"n": 1, "x": X, "mask": MASK}, other)
    assert (kwargs["x"] is other, kwargs["mask"] is MASK) == (True, True)


def test_what_is_no_stream_is_refused() -> None:
    with pytest.raises(WrongUse, match=r"blocks\.0 is called with shape \(3, 3\)"):
        stream((MASK,), {}, "blocks.0")
    with pytest.raises(WrongUse, match="with no tensor"):
        stream((), {"n": 1}, "blocks.0")
