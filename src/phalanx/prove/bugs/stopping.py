"""Known bugs after which ranks stop: one leaves, dies, or does not take part in what the others wait for."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from torch import Tensor

from phalanx.prove.bugs import seams
from phalanx.prove.bugs.planting import bug, rank
from phalanx.prove.bugs.seams import Replace


def _in_backward_of_rank_1(replace: Replace, act: Callable[[], object]) -> None:
    plain = seams.BACKWARD.plain

    def backward(self: Any, *args: Any) -> None:
        if rank() == 1:
            act()
        plain(self, *args)

    replace(seams.BACKWARD, backward)


@bug(41, "dp=2", "wait|collective|run", "dp")
def one_rank_runs_out_of_data(replace: Replace) -> None:
    """One rank has fewer batches than the others, and leaves while they wait."""
    plain = seams.BATCHES.plain
    replace(seams.BATCHES, lambda self, start, stop: plain(self, start, stop - self.rank))


@bug(55, "dp=2", "collective", "dp")
def a_rank_skips_a_collective(replace: Replace) -> None:
    """One rank takes a branch without the collective that the others wait in."""
    plain = seams.SUM_OVER_REPLICAS.plain

    def summed(self: Any, bucket: Any) -> None:
        if rank() == 0 or bucket is not self.buckets[-1]:
            plain(self, bucket)

    replace(seams.SUM_OVER_REPLICAS, summed)


@bug(57, "dp=2", "collective|ended", "dp")
def a_rank_sends_another_size(replace: Replace) -> None:
    """One rank's part of a collective is shorter than the others'."""

    def shorter(tensor: Tensor) -> Tensor:
        return tensor[: len(tensor) // 2] if rank() == 1 and tensor.numel() > 100 else tensor

    seams.all_reducing(replace, shorter)


@bug(60, "dp=2", "MemoryError", "dp")
def memory_runs_out_on_one_rank(replace: Replace) -> None:
    """One rank cannot allocate, and the others wait for it."""

    def fail() -> None:
        raise MemoryError("cannot allocate")

    _in_backward_of_rank_1(replace, fail)


@bug(61, "dp=2", "ended|collective", "dp")
def a_rank_is_killed(replace: Replace) -> None:
    """One rank is ended from outside."""
    _in_backward_of_rank_1(replace, lambda: os.kill(os.getpid(), signal.SIGKILL))
