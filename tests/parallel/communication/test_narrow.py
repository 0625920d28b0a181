"""Activations in fewer bits: what arrives, in how many bytes, and what is not finite."""

from __future__ import annotations

import math

import pytest
import torch

from phalanx.parallel.communication.narrow import Narrow


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "near", "bytes_"), [("bf16", 2**-8, 2 * 48), ("fp8", 2**-4, 48 + 6 * 4)])
def test_numbers_arrive_rounded(dtype: torch.dtype, kind: str, near: float, bytes_: int) -> None:
    x = torch.randn(2, 3, 8, dtype=dtype, generator=torch.Generator().manual_seed(0)).transpose(0, 1)
    narrow = Narrow(kind)
    message = narrow.encode(x)
    assert message.numel() * message.element_size() == bytes_
    room = narrow.room(x.shape, x.dtype, x.device)
    assert (room.shape, room.dtype) == (message.shape, message.dtype)
    found = narrow.decode(message, x.shape, x.dtype)
    assert (found.dtype, found.shape) == (x.dtype, x.shape)
    assert not torch.equal(found, x)
    assert ((found - x).abs() <= near * x.abs().amax(-1, keepdim=True)).all()
    assert torch.equal(narrow.rounded(x[:1]), found[:1])  # whatever else is there


def test_small_rows_of_16_bits_arrive_too() -> None:
    """Their largest, by the largest code, is too small for 16 bits."""
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(0)) * torch.logspace(-5, -1, 6).unsqueeze(1)
    narrow = x.half()
    found = Narrow("fp8").rounded(narrow)
    assert found.dtype == torch.float16
    assert ((found - narrow).float().abs() <= 2**-4 * narrow.float().abs().amax(-1, keepdim=True) + 2**-24).all()


def test_what_is_narrow_already_is_sent_as_it_is() -> None:
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    assert Narrow("bf16").encode(x).data_ptr() == x.data_ptr()
    assert Narrow("exact").encode(x.double()).dtype == torch.float64
    assert Narrow("fp8").encode(x).dtype == torch.uint8


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_what_is_not_finite_stays_so(kind: str) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.randn(3, 4)
        x[1, 2] = bad
        found = Narrow(kind).rounded(x)
        assert not found[1].isfinite().all()
        assert found[[0, 2]].isfinite().all()
    assert not Narrow(kind).rounded(torch.zeros(2, 4)).any()
    assert Narrow(kind).rounded(torch.empty(0, 4)).shape == (0, 4)


@pytest.mark.parametrize("kind", ["exact", "bf16", "fp8"])
@pytest.mark.parametrize("shape", [(3, 2, 5, 8), (3, 0, 8), (2, 8)])
def test_each_rank_has_a_message_of_its_own(kind: str, shape: tuple[int, ...]) -> None:
    narrow, parts = Narrow(kind), torch.randn(shape)
    messages = narrow.encode_each(parts)
    assert len(messages) == shape[0]
    assert torch.equal(narrow.decode(messages, shape, parts.dtype), narrow.rounded(parts))
    last = narrow.decode(messages[-1:].clone(), (1, *shape[1:]), parts.dtype)
    assert torch.equal(last[0], narrow.rounded(parts[-1]))
