"""What a trace says of a rank's time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx.watch.trace import RankTrace
from phalanx.watch.trace_times import RankTimes
from tests.watch.test_trace import range_of, written


def named(name: str, begin: float, length: float) -> dict[str, Any]:
    return range_of(name, begin, length, cat="user_annotation")


STEP = [
    range_of("aten::mm", 103.0, 5.0),  # of an evaluation between the two
    named("wait: world all-reduce", 104.0, 1.0),
    named("step 1", 0.0, 100.0),
    named("phase: forward", 0.0, 60.0),
    named("wait: fsdp all-gather", 10.0, 20.0),
    named("phase: backward", 60.0, 40.0),
    named("wait: fsdp reduce-scatter", 70.0, 5.0),
    named("step 2", 110.0, 90.0),
    named("phase: forward", 110.0, 90.0),
    range_of("aten::linear", 30.0, 20.0),
    range_of("aten::mm", 35.0, 10.0),
    range_of("aten::mm", 120.0, 4.0),
    range_of("aten::mm", 120.0, 6.0, tid=8),
]


def times(tmp_path: Path, events: list[dict[str, Any]], **facts: Any) -> RankTimes:
    return RankTimes.of(RankTrace.read(written(tmp_path, 0, events, **facts)))


def test_phases_waits_and_own_time(tmp_path: Path) -> None:
    found = times(tmp_path, STEP)
    assert found.steps == [100.0, 90.0]
    assert found.window == 200.0
    assert found.phases == {"forward": 150.0, "backward": 40.0}
    assert found.waits_in == {"forward": 20.0, "backward": 5.0}
    assert found.waits == {"fsdp all-gather": 20.0, "fsdp reduce-scatter": 5.0}
    assert found.operators == {"aten::linear": 10.0, "aten::mm": 20.0}
    assert found.calls == {"aten::linear": 1, "aten::mm": 3}
    assert found.works == 165.0
    assert found.gpu_busy is None


def test_a_gpu_is_idle_where_nothing_runs(tmp_path: Path) -> None:
    kernels = [
        range_of("gemm", 0.0, 50.0, cat="kernel", pid=0, tid=7),
        range_of("gemm", 40.0, 20.0, cat="kernel", pid=0, tid=9),
        range_of("copy", 190.0, 60.0, cat="gpu_memcpy", pid=0, tid=7),
        range_of(
            "ncclDevKernel_AllGather", 50.0, 40.0, cat="kernel", pid=0, tid=13,
            args={"Process Group Description": "fsdp", "Collective name": "allgather"},
        ),
    ]  # fmt: skip
    found = times(tmp_path, [*STEP, *kernels], device="cuda:0")
    assert found.gpu_busy == 100.0  # 0 to 90, and 190 to 200: what is after the last step does not count
    assert found.gpu_exposed == 30.0
    assert found.works == 70.0
    assert found.by_axis == {"fsdp allgather": 40.0}
    assert found.operators == {"gemm": 70.0, "copy": 60.0, "ncclDevKernel_AllGather": 40.0}


@pytest.mark.parametrize("events", [[], [range_of("aten::mm", 0.0, 1.0)]])
def test_a_trace_without_steps(tmp_path: Path, events: list[dict[str, Any]]) -> None:
    found = times(tmp_path, events)
    assert found.steps == []
    assert found.window == 0.0
