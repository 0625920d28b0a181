"""Clocks of hosts that differ: by how much is seen by ranks that leave collectives together."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest

from phalanx.train.profile.host_clocks import difference
from tests.hosts import Hosts, needs_namespaces
from tests.test_cli import GOOD

TWO = ("--on", "local:1", "--device", "cpu", "--max-nodes", "2", "--min-nodes", "2", "--meet", "node1:29400")


def test_a_round_that_was_held_up_does_not_count() -> None:
    readings = [0, 1_000, 2_000, 3_000, 4_000]
    late = [5_000, 6_010, 6_990, 907_000, 9_000]
    assert difference(late, readings) == 5_000
    assert difference(readings, readings) == 0


@needs_namespaces
@pytest.mark.skipif(shutil.which("faketime") is None, reason="faketime is not installed (Debian: faketime)")
def test_a_host_whose_clock_is_ahead_is_seen_at_the_same_moments(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GOOD)
    words = ("train", "mine.py", *TWO, "--run", "run", "--profile", "3:5", "--unchecked")
    with Hosts(2, tmp_path) as hosts:
        first = hosts["node1"].phalanx(tmp_path, *words)
        ahead = hosts["node2"].phalanx(tmp_path, *words, under=("faketime", "-f", "+3"))
        told = [process.communicate(timeout=200)[0] for process in (first, ahead)]
    assert (first.returncode, ahead.returncode) == (0, 0), told
    with gzip.open(tmp_path / "run" / "profile" / "steps-3-5.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    assert sorted(name.partition(" on ")[0] for name in names.values()) == ["rank 0", "rank 1"]
    assert {name.partition(" on ")[2] for name in names.values()} == {"node1", "node2"}
    begins = {pid: [e["ts"] for e in events if e.get("name") == "step 4" and e["pid"] == pid] for pid in names}
    ((one,), (other,)) = begins.values()
    assert abs(one - other) < 500_000, "3 seconds apart by their clocks"
