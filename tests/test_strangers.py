"""Strangers at the ports of a run: whatever they send, it trains on, and they learn nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx import Run
from tests.ports import free_port
from tests.test_recovery import TASK

ROOT = Path(__file__).parents[1]


@pytest.mark.every
def test_a_rank_dies_while_strangers_hold_connections_and_descriptors_are_few(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(TASK)
    address = ("127.0.0.1", free_port())
    words = [
        "train", "slow.py", "--on", "local:2", "--steps", "120", "--set", "pause=0.05", "--run", "run",
        "--layout", "dp=4", "--max-nodes", "2", "--min-nodes", "1", "--meet", f"127.0.0.1:{address[1]}", "--host", "a",
    ]  # fmt: skip
    command = f"ulimit -n 256; exec {sys.executable} -m phalanx {' '.join(words)}"
    process = subprocess.Popen(["bash", "-c", command], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    run = Run(tmp_path / "run")
    while not run.path.exists() or max(run.ledger(), default=0) < 10:
        assert process.poll() is None
        time.sleep(0.05)
    idle = [socket.create_connection(address) for _ in range(400)]
    time.sleep(0.5)
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(ranks[1]), signal.SIGKILL)
    _, said = process.communicate(timeout=120)
    for sock in idle:
        sock.close()
    assert process.returncode == 0, said
    assert "was ended by SIGKILL" in said
    assert "closed without proof of the run's key" in said
    assert "Traceback" not in said


@pytest.mark.every
def test_a_minute_of_strangers() -> None:
    command = [sys.executable, "benchmarks/strangers.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
