"""Every layout over dp, fsdp and tp trains like one device, in float64, on hostile data: the promise itself."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from phalanx import Layout
from tests.parity import TASKS, TOLERANCE, Trace, difference, reference, spread_run
from tests.ranks import Ranks

MICRO_BATCHES = (1, 4)


TENSOR = {"language": (1, 2), "many heads": (4,), "vision": (1,)}
"""The degrees of ``tp`` that a task is tried with, on up to 4 ranks."""


def layouts(name: str, world: int, micro_batches: int) -> Iterator[Layout]:
    """All factorizations of the world over dp, fsdp and tp, all ZeRO stages, recompute on and off.

    With tp, recompute goes with accumulation, to keep the suite short.
    """
    for tp, fsdp, recompute in itertools.product(TENSOR[name], (1, 2, 4, 8), ("none", "full")):
        if world % (fsdp * tp) == 0 and (tp == 1 or (world <= 4 and (recompute == "full") == (micro_batches > 1))):
            share = -(-TASKS[name]().global_batch // (world // tp))
            micro = None if micro_batches == 1 else -(-share // micro_batches)
            for zero in (1, 2, 3) if fsdp > 1 else (3,):
                dp = world // fsdp // tp
                yield Layout(dp=dp, fsdp=fsdp, tp=tp, zero=zero, recompute=recompute, micro_batch=micro)


@functools.cache
def one_device(name: str, micro_batches: int) -> Trace:
    return reference(TASKS[name](), micro_batches)


def run_all(name: str, chosen: list[Layout]) -> list[Trace]:
    """Every layout in turn; ranks but the first keep only what is small."""
    traces = []
    for layout in chosen:
        traces.append(spread_run(TASKS[name](), layout))
        gc.collect()
    if dist.is_initialized() and dist.get_rank():
        return [Trace(trace.losses, trace.norms) for trace in traces]
    return traces


@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
@pytest.mark.parametrize(("name", "world"), [(n, w) for n in TASKS for w in (1, 2, 4, 8) if min(TENSOR[n]) in (1, w)])
def test_every_layout_trains_like_one_device(ranks: Ranks, name: str, world: int, micro_batches: int) -> None:
    batch = TASKS[name]().global_batch
    chosen = list(layouts(name, world, micro_batches))
    answers = ranks(world, run_all, name, chosen)
    wrong = []
    for index, layout in enumerate(chosen):
        traces = [answer[index] for answer in answers]
        expected = one_device(name, layout.micro_batches(batch))
        error, where = difference(traces[0], expected)
        if not error < TOLERANCE:
            wrong.append(f"{layout}: {error:.2e} in {where}")
        for trace in traces[1:]:
            assert (trace.losses, trace.norms) == (traces[0].losses, traces[0].norms), f"{layout}: ranks disagree"
    assert not wrong, "\n".join(wrong)


def test_the_data_is_hostile() -> None:
    """Clipping is active, the last batch is short, and some weights have no gradient."""
    for name in TASKS:
        task = TASKS[name]()
        trace = one_device(name, 1)
        assert all(norm > 2 * task.clip for norm in trace.norms)
        assert len(task.data()) % task.global_batch
        assert any(gradient is None for gradient in trace.gradients[0].values())
