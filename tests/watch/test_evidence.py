"""What a run's folder has: failures in order, stacks by thread, lines of the user's."""

from __future__ import annotations

import json
from pathlib import Path

from phalanx import user_code
from phalanx.run import Run
from phalanx.watch.evidence import Evidence, RankStacks

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
    usual = {"reason": "failed", "secondary": False, "stuck": False, "timed_out": False, "final": False, "trace": ""}
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
