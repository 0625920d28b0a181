"""The doctor: a machine that is fit is said to be, hosts that cannot train together are named before the first step."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from phalanx.train import doctor
from tests.hosts import Hosts, needs_namespaces
from tests.test_cli import phalanx
from tests.test_recovery import TASK


def test_this_machine_is_fit(tmp_path: Path) -> None:
    done = phalanx("doctor", "--on", "local:2", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the ground is fit to train on" in done.stdout
    assert f"torch {torch.__version__}" in done.stdout
    assert "links between ranks:" in done.stdout
    assert "2 ranks met, and each computed what it should" in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_slow_link_is_named() -> None:
    assert doctor._slowest({(0, 1): 1e9, (1, 2): 1e9, (2, 0): 1e8}, [0, 1, 2]) == [
        "links between hosts: 8 Gbit/s in the middle, slowest rank 2 to rank 0, 0.8 Gbit/s",
        "the link from rank 2, on host 3, to rank 0 is far slower than others",
    ]
    (told,) = doctor._slowest({(0, 1): 1e9, (1, 0): 2e9, (1, 2): 3e9}, [0, 0, 1])
    assert told.endswith("rank 1 to rank 2, 24 Gbit/s")


TWO = ("--on", "local:1", "--device", "cpu", "--max-nodes", "2", "--meet", "node1:29400", "--run", "run")


@needs_namespaces
def test_hosts_are_examined_together(tmp_path: Path) -> None:
    with Hosts(2, tmp_path) as hosts:
        processes = [hosts[name].phalanx(tmp_path, "doctor", *TWO) for name in ("node1", "node2")]
        told = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], told
    (first,) = (text for text in told if "fit to train on" in text)
    for words in ("node1: torch", "node2: torch", "links between hosts:", "2 ranks met"):
        assert words in first


@needs_namespaces
@pytest.mark.skipif(shutil.which("faketime") is None, reason="faketime is not installed (Debian: faketime)")
def test_a_clock_that_is_off_by_a_day_is_named_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(TASK)
    with Hosts(2, tmp_path) as hosts:
        first = hosts["node1"].phalanx(tmp_path, "train", "slow.py", *TWO)
        off = hosts["node2"].phalanx(tmp_path, "train", "slow.py", *TWO, under=("faketime", "-f", "+1d"))
        told = [process.communicate(timeout=200)[0] for process in (first, off)]
    assert off.returncode == 3, told  # the other goes on alone, as --min-nodes 1 has it
    assert "the clock of host node" in told[1]
    assert "is 24.0 hours" in told[1]
    assert "step 1/" not in told[1]


@needs_namespaces
def test_hosts_with_other_code_are_named_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(TASK)
    other = tmp_path / "other"
    other.mkdir()
    (other / "slow.py").write_text(TASK + "# edited")
    with Hosts(2, tmp_path) as hosts:
        words = ("train", "slow.py", *TWO[:-1], str(tmp_path / "run"), "--timeout", "20")
        processes = [hosts["node1"].phalanx(tmp_path, *words), hosts["node2"].phalanx(other, *words)]
        told = [process.communicate(timeout=200)[0] for process in processes]
    assert any("Give all hosts the same files of the task" in text for text in told), told
