"""What a run's folder has: failures in order, stacks by thread, lines of the user's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx import user_code
from phalanx.events import EventLog
from phalanx.run import Run
from phalanx.watch.evidence import Evidence, RankStacks
from phalanx.watch.why import why

ROOT = user_code.OWN / "launch" / "local.py"
STACKS = f"""rank 1, process 20 on node1: sleeping, state S in futex_wait
Thread 0x00000002 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait

Current thread 0x00000001 (most recent call first):
  File "/usr/lib/python3.11/queue.py", line 3 in get
  File "{user_code.OWN / "data" / "loader.py"}", line 5 in batches
  File "{ROOT}", line 300 in _rank
  File "/home/me/script.py", line 1 in <module>

process 21, started by rank 1 on node1: sleeping, state S
Current thread 0x00000001 (most recent call first):
  File "/home/me/task.py", line 31 in __getitem__
  File "{ROOT}", line 300 in _rank
"""


def account(path: Path, generation: int, first: int, *failures: dict[str, object], time: float = 0.0) -> None:
    usual = {
        "reason": "failed",
        "secondary": False,
        "stuck": False,
        "timed_out": False,
        "final": False,
        "trace": "",
        "file": "",
    }
    told = {"host": f"node{first}", "generation": generation, "steps": 7, "time": time}
    (path / "failures").mkdir(exist_ok=True)
    file = path / "failures" / f"generation-{generation:05d}-from-{first:05d}.json"
    file.write_text(json.dumps({**told, "failures": [{**usual, **failure} for failure in failures]}))


def test_causes_come_before_what_followed(tmp_path: Path) -> None:
    (tmp_path / "generation").write_text("2")
    account(tmp_path, 1, 0, {"rank": 0})
    account(tmp_path, 2, 0, {"rank": 1, "secondary": True}, {"rank": 0, "reason": "was stopped"}, time=1)
    account(tmp_path, 2, 2, {"rank": 3}, {"rank": 2, "secondary": True}, time=2)
    (tmp_path / "failures" / "generation-00002-from-00009.json").write_text("cut")
    found = Evidence.of(Run(tmp_path))
    assert [each["rank"] for each in found.failures] == [3, 1, 2, 0]
    assert [(each["generation"], each["rank"]) for each in found.earlier] == [(1, 0)]
    assert found.host(3) == "node2"
    assert not found.live


def test_the_users_innermost_line_is_found_in_who_reads_for_a_rank(tmp_path: Path) -> None:
    (tmp_path / "generation").write_text("1")
    folder = tmp_path / "stacks" / "generation-00001"
    folder.mkdir(parents=True)
    (folder / "rank-00001.txt").write_text(STACKS)
    found = Evidence.of(Run(tmp_path))
    frame = found.line(1)
    assert frame is not None
    assert (frame.place, frame.name) == ("/home/me/task.py:31", "__getitem__")
    assert found.stacks[1].state == "sleeping, state S in futex_wait"
    assert not found.stacks[1].stopped
    assert found.line(0) is None


def test_without_a_line_of_the_users_ours_is_named() -> None:
    frames = RankStacks(STACKS.partition("\nprocess")[0]).frames(1)
    assert [frame.place for frame in frames][1:] == ["phalanx/data/loader.py:5"]
    assert not RankStacks("rank 1, process 20 on node1: stopped (SIGSTOP), state T\nit cannot answer").frames(1)
    assert RankStacks("rank 1, process 20 on node1: stopped (SIGSTOP), state T\n").stopped


def test_a_rank_that_raised_has_the_lines_of_its_error(tmp_path: Path) -> None:
    (tmp_path / "generation").write_text("1")
    account(tmp_path, 1, 0, {"rank": 1, "secondary": True, "file": "elsewhere/failures/trace.txt"})
    (tmp_path / "failures" / "trace.txt").write_text(
        "Traceback (most recent call last):\n"
        '  File "/home/me/task.py", line 31, in loss\n    dist.all_reduce(x)\n'
        '  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3, in all_reduce\n'
        "RuntimeError: Timed out\n"
    )
    found = Evidence.of(Run(tmp_path))
    line = found.line(1)
    assert line is not None
    assert (line.line, line.name) == (31, "loss")
    assert found.called(1) == "torch.distributed.all_reduce"


@pytest.mark.parametrize("last", ["stopped", "end"])
def test_a_run_that_was_taken_up_again_has_not_ended_as_before(tmp_path: Path, last: str) -> None:
    run = Run(tmp_path)
    with EventLog(run, 0) as log:
        log.write("start", generation=1, step=0)
        log.write("step", step=0, samples="", loss=1.0, skipped=False)
        log.write(last, steps=1)
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "certificate.json").write_text('{"steps": 1}')
    (tmp_path / "generation").write_text("1")
    before = Evidence.of(run)
    assert (before.done, before.stopped) == (True, last == "stopped")
    (tmp_path / "generation").write_text("2")  # killed before ranks came to their start
    found = Evidence.of(run)
    assert (found.done, found.stopped, found.ended) == (False, False, False)
    assert "ended without a word" in why(run).summary
