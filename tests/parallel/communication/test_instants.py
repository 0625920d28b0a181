"""Moments: of a processor here; a GPU's are queried, and never waited for."""

from __future__ import annotations

import time

import pytest
import torch

from phalanx.parallel.communication.instants import elapsed, has_come, now


def test_seconds_between_two_moments() -> None:
    before = now(cuda=False)
    time.sleep(0.02)
    after = now(cuda=False)
    assert has_come(after)
    assert elapsed(before, after) == pytest.approx(0.02, abs=0.02)


@pytest.mark.gpu
def test_a_busy_gpu_has_not_come_to_it() -> None:
    before = now(cuda=True)
    torch.cuda._sleep(1_000_000_000)
    after = now(cuda=True)
    assert not has_come(after)
    torch.cuda.synchronize()
    assert has_come(after)
    assert elapsed(before, after) > 0.05
