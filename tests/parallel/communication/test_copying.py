"""Copies beside what a device computes: there when the device comes to them."""

from __future__ import annotations

import pytest
import torch

from phalanx.parallel.communication.copying import Copying
from phalanx.parallel.communication.memory import Room


def test_on_a_processor_they_are_done_at_once() -> None:
    one, other = torch.randn(4), torch.zeros(4)
    copying = Copying(torch.device("cpu"))
    with copying.beside() as arrived:
        other.copy_(one, non_blocking=True)
    arrived()
    copying.finish()
    assert torch.equal(one, other)


@pytest.mark.gpu
def test_a_gpu_waits_for_them() -> None:
    device = torch.device("cuda")
    coming, going = Copying(device), Copying(device)
    host = Room((1 << 22,), torch.float32, torch.device("cpu"), device).tensor.normal_()
    assert host.is_pinned()
    want = host.clone().mul_(2)
    there, busy = torch.empty(1 << 22, device=device), torch.zeros(8192, 8192, device=device)
    for _ in range(3):  # each begins when what the device was doing is done
        busy @ busy
        with coming.beside() as arrived:
            there.copy_(host, non_blocking=True)
        arrived()
        there.mul_(2)
        with going.beside():
            host.copy_(there, non_blocking=True)
        going.finish()
        assert torch.equal(host, want)
        want.mul_(2)
