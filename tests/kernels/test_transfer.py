"""Small tensors on their way to a device."""

from __future__ import annotations

import pytest
import torch

from phalanx.kernels.transfer import sent


def test_what_arrives_is_what_was_sent() -> None:
    numbers = torch.tensor([1.5, -2.0], dtype=torch.float64)
    assert torch.equal(sent(numbers, torch.device("cpu")), numbers)


@pytest.mark.gpu
def test_nobody_waits_for_the_gpu() -> None:
    device, done = torch.device("cuda"), torch.cuda.Event()
    sent(torch.zeros(3), device)  # pinned memory is had once
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    found = sent(torch.tensor([1, 2, 3]), device)
    done.record()
    assert not done.query()
    assert found.tolist() == [1, 2, 3]
