"""A profile in words."""

from __future__ import annotations

from pathlib import Path

from phalanx.watch.trace_summary import conclude
from tests.watch.test_trace import range_of, written
from tests.watch.test_trace_times import STEP, named


def test_it_says_where_the_time_went_and_who_was_slowest(tmp_path: Path) -> None:
    millisecond = [{**event, "ts": event["ts"] * 1000, "dur": event["dur"] * 1000} for event in STEP]
    counts = {"sent": [["fsdp", "all-gather", 4096]], "calls": [["fsdp", "all-gather", 4]]}
    written(tmp_path, 0, millisecond, **counts)
    written(
        tmp_path,
        1,
        [{**e, "dur": e["dur"] * 0.9} if e["name"].startswith("wait") else e for e in millisecond],
        **counts,
    )
    text = conclude(tmp_path, "steps-1-2")
    assert text is not None
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "profile of steps 1 to 2 on 2 ranks of 2 (dp=2)"
    assert lines[1] == "a step took 95.00 ms, with what the profiler costs"
    assert "forward 75.00 79 % 9.50" in lines
    assert "backward 20.00 21 % 2.38" in lines
    assert "(between steps) 5.00" in lines
    assert "fsdp all-gather 9.50 2 2 KiB" in lines
    assert "aten::mm 10.00 11 % 1.5" in lines
    assert any(line.startswith("slowest: rank 1 on host b works 83.75 ms of a step") for line in lines)
    assert "GPU" not in text
    assert (tmp_path / "profile" / "steps-1-2.txt").read_text() == text
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == ["steps-1-2.json.gz", "steps-1-2.txt"]


def test_a_gpu_that_stood_idle_or_was_not_seen(tmp_path: Path) -> None:
    kernel = range_of("gemm", 0.0, 50.0, cat="kernel", pid=0)
    written(tmp_path, 0, [*STEP, kernel], device="cuda:0", chosen=[0])
    text = conclude(tmp_path, "steps-1-2")
    assert text is not None
    assert "GPUs stood idle 75 % of the time, most that of rank 0 on host a: 75 %" in text
    written(tmp_path, 0, STEP, device="cuda:0", chosen=[0])
    text = conclude(tmp_path, "steps-1-2")
    assert text is not None
    assert "no GPU activity was recorded of rank 0 on host a" in text


def test_ranks_that_left_nothing_are_named_and_what_is_there_is_kept(tmp_path: Path) -> None:
    written(tmp_path, 0, STEP)
    broken = written(tmp_path, 1, STEP)
    broken.write_bytes(broken.read_bytes()[:40])
    text = conclude(tmp_path, "steps-1-2")
    assert text is not None
    assert "1 rank left no whole trace" in text
    assert broken.exists()
    assert conclude(tmp_path, "steps-8-9") is None


def test_nothing_whole_is_said(tmp_path: Path) -> None:
    written(tmp_path, 0, [named("step 1", 0.0, 1.0)]).write_bytes(b"")
    text = conclude(tmp_path, "steps-1-2")
    assert text is not None
    assert text.startswith("nothing was profiled that can be read")
    assert not (tmp_path / "profile" / "steps-1-2.json.gz").exists()
