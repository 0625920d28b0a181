"""Moments of a processor or of a GPU, and the seconds between them; a GPU's are never waited for."""

from __future__ import annotations

import time

import torch

Instant = float | torch.cuda.Event


def now(cuda: bool) -> Instant:
    """This moment, or when a GPU comes to what is launched next; in a graph, whenever that is replayed."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True, external=torch.cuda.is_current_stream_capturing())
    event.record()
    return event


def has_come(instant: Instant) -> bool:
    """Whether it is past."""
    return not isinstance(instant, torch.cuda.Event) or instant.query()


def elapsed(before: Instant, after: Instant) -> float:
    """Seconds between two of one kind; a GPU must have come to both."""
    if isinstance(before, torch.cuda.Event):
        assert isinstance(after, torch.cuda.Event)
        return before.elapsed_time(after) / 1000
    assert isinstance(after, float)
    return after - before
