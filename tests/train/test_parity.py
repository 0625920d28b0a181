"""Every layout trains like one device, in float64, on hostile data: the promise itself.

Of the many layouts of 4 and 8 ranks the suite takes some in which every two settings meet; ``pytest
tests/train/test_parity.py --every`` takes all.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence

import pytest
import torch.distributed as dist

from phalanx import Layout, Task
from phalanx.prove.layouts import covering
from tests.layouts import every_layout, task_for
from tests.parity import TASKS, TOLERANCE, HostileVision, Packed, Trace, difference, reference, spread_run
from tests.ranks import Ranks

Case = tuple[Task, Layout]
AT_ONCE = 8


def run_all(cases: Sequence[Case]) -> list[Trace]:
    """Every case in turn; ranks but the first keep only what is small."""
    traces = []
    for task, layout in cases:
        traces.append(spread_run(task, layout))
        gc.collect()
    if dist.is_initialized() and dist.get_rank():
        return [Trace(trace.losses, trace.norms) for trace in traces]
    return traces


KNOWN: dict[tuple[str, int], Trace] = {}


def one_device(task: Task, micro_batches: int) -> Trace:
    key = repr(task), micro_batches
    if key not in KNOWN:
        KNOWN[key] = reference(task, micro_batches)
    return KNOWN[key]


def compare(ranks: Ranks, world: int, cases: list[Case]) -> None:
    wrong = []
    for start in range(0, len(cases), AT_ONCE):
        wrong += _wrong(ranks, world, cases[start : start + AT_ONCE])
    assert not wrong, "\n".join(wrong)


def _wrong(ranks: Ranks, world: int, cases: list[Case]) -> Iterator[str]:
    answers = ranks(world, run_all, cases)
    for index, (task, layout) in enumerate(cases):
        traces = [answer[index] for answer in answers]
        error, where = difference(traces[0], one_device(task, layout.micro_batches(task.global_batch)))
        if not error < TOLERANCE:
            yield f"{type(task).__name__} {layout}: {error:.2e} in {where}"
        for trace in traces[1:]:
            assert (trace.losses, trace.norms) == (traces[0].losses, traces[0].norms), f"{layout}: ranks disagree"


@pytest.mark.parametrize(("world", "part"), [
    pytest.param(world, part, marks=[pytest.mark.every] if world == 8 and part else [])
    for world in (1, 2, 4, 8) for part in range(12 if world == 8 else 4)
])  # fmt: skip
@pytest.mark.parametrize("experts", [False, True])
def test_every_layout_trains_like_one_device(
    ranks: Ranks, world: int, experts: bool, part: int, request: pytest.FixtureRequest
) -> None:
    layouts = list(every_layout(world, experts=experts))
    if not request.config.getoption("--every") and world >= 4:
        layouts = covering(layouts)
    compare(ranks, world, [(task_for(layout), layout) for layout in layouts[part :: 12 if world == 8 else 4]])


@pytest.mark.parametrize("layout", [
    pytest.param("fsdp=2,tp=2,cp=2,pp=2,micro_batch=4", marks=pytest.mark.every),
    "fsdp=2,tp=2,cp=2,pp=2,ep=4,micro_batch=4",
])  # fmt: skip
def test_sixteen_ranks(layout: str) -> None:
    pool = Ranks(16)
    try:
        parsed = Layout.parse(layout)
        compare(pool, 16, [(task_for(parsed), parsed)])
    finally:
        pool.close()


def accumulating(task: type[Task], world: int, micro_batches: int) -> Iterator[Case]:
    """dp and fsdp, all ZeRO stages; several micro-batches with recompute, one without."""
    recompute = "none" if micro_batches == 1 else "full"
    for fsdp in (1, 2, 4, 8):
        if world % fsdp == 0:
            share = -(-task.global_batch // world)
            micro = None if micro_batches == 1 else -(-share // micro_batches)
            for zero in (1, 2, 3) if fsdp > 1 else (3,):
                yield task(), Layout(dp=world // fsdp, fsdp=fsdp, zero=zero, recompute=recompute, micro_batch=micro)


@pytest.mark.parametrize(("name", "world", "micro_batches"), [
    ("language", 1, 4), ("language", 4, 4), ("vision", 1, 1), ("vision", 2, 1), ("vision", 4, 1),
    pytest.param("vision", 2, 4, marks=pytest.mark.every),
    pytest.param("vision", 8, 4, marks=pytest.mark.every),
])  # fmt: skip
def test_accumulation_changes_nothing(ranks: Ranks, name: str, world: int, micro_batches: int) -> None:
    compare(ranks, world, list(accumulating(TASKS[name], world, micro_batches)))


def test_exact_sums_are_right_too(ranks: Ranks) -> None:
    layouts = ["dp=4,exact=8", "dp=2,fsdp=2,zero=2,exact=8", "fsdp=4,exact=16,recompute=full"]
    compare(ranks, 4, [(TASKS["language"](), Layout.parse(layout)) for layout in layouts])


def test_packed_documents_stay_apart(ranks: Ranks) -> None:
    layouts = ["cp=4", "cp=4,cp_kind=ulysses", "cp=2,tp=2,recompute=full", "cp=2,pp=2,cp_kind=ulysses,micro_batch=8"]
    compare(ranks, 4, [(Packed(heads=8, kv_heads=2), Layout.parse(layout)) for layout in layouts])


def test_experts_with_limited_room(ranks: Ranks) -> None:
    layouts = ["fsdp=2,cp=2,ep=4", "tp=2,cp=2,ep=2", "fsdp=2,ep=2,pp=2,micro_batch=4"]
    compare(ranks, 4, [(TASKS["mixture"](capacity=0.6), Layout.parse(layout)) for layout in layouts])


def test_models_without_time_go_through_a_pipeline(ranks: Ranks) -> None:
    layouts = ["pp=2,micro_batch=8", "pp=2,schedule=zb,micro_batch=8,recompute=full"]
    compare(ranks, 2, [(HostileVision(), Layout.parse(layout)) for layout in layouts])


def test_the_data_is_hostile() -> None:
    """Clipping is active, the last batch is short, and some weights have no gradient."""
    for kind in TASKS.values():
        task = kind()
        trace = one_device(task, 1)
        assert all(norm > 2 * task.clip for norm in trace.norms)
        assert len(task.data()) % task.global_batch
        assert any(gradient is None for gradient in trace.gradients[0].values())
