"""Processes are forked from one that has never computed, or from a fresh interpreter where that is too late."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx
from phalanx.errors import CannotHere, WrongUse
from phalanx.launch.forkserver import ForkServer, loads
from tests.forking import fork, server
from tests.prove import tasks


def compute() -> None:
    torch.ones(1, requires_grad=True).sum().backward()


def tell(said: str, writing: int) -> None:
    os.write(writing, f"{said} {os.environ['SAID']} {os.getcwd()}".encode())


def test_a_process_has_its_owners_environment_folder_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAID", "so")
    monkeypatch.chdir(tmp_path)
    reading, writing = os.pipe()
    process = fork(tell, "well", descriptors=(writing,))
    os.close(writing)
    with os.fdopen(reading) as said:
        assert said.read() == f"well so {tmp_path}"
    process.join()
    assert process.exitcode == 0


def test_processes_that_end_badly_or_are_ended_say_so() -> None:
    left = fork(os._exit, 7)
    left.join()
    assert left.exitcode == 7
    waits = fork(signal.pause)
    waits.join(timeout=0.05)
    assert waits.is_alive()
    waits.kill()
    assert waits.exitcode == -signal.SIGKILL


def test_what_a_process_computes_leaves_its_server_able_to_fork() -> None:
    compute()  # this process is now one that must not be forked from
    for _ in range(2):
        process = fork(compute)
        process.join()
        assert process.exitcode == 0


def _own_server() -> None:
    made = ForkServer()
    pids = [made.fork(signal.pause).pid for _ in range(2)]
    assert not made.fresh
    made.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(CannotHere, match="has ended"):
        made.fork(compute)


def _two_servers() -> None:
    first, second = ForkServer(), ForkServer()
    first.close()  # though the second was forked while the first was there
    second.close()


def test_servers_end_in_any_order() -> None:
    process = fork(_two_servers)
    process.join(timeout=30)
    code = process.exitcode
    process.kill()
    assert code == 0


def test_a_server_takes_its_processes_with_it() -> None:
    process = fork(_own_server)
    process.join()
    assert process.exitcode == 0


@dataclass
class KeepsALock(tasks.Plain):
    """Something that cannot be copied: it was there when the ranks were forked."""

    def __post_init__(self) -> None:
        self.lock = threading.Lock()

    def model(self) -> Any:
        with self.lock:
            return super().model()


def _prove_what_cannot_be_copied() -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(KeepsALock())
    assert phalanx.prove(KeepsALock(), ["dp=2"]).holds


def _prove_after_computing() -> None:
    compute()
    assert phalanx.prove(tasks.Plain(), ["dp=2"]).holds
    with pytest.raises(WrongUse, match="cannot be sent to other processes"):
        phalanx.prove(KeepsALock(), ["dp=2"])


@pytest.mark.parametrize("program", [_prove_what_cannot_be_copied, _prove_after_computing])
def test_a_proof_starts_a_server_of_its_own(program: Any) -> None:
    process = fork(program)
    process.join()
    assert process.exitcode == 0


NOTEBOOK = """
import sys
sys.path.insert(0, {root!r})
from tests import cuda_rule
cuda_rule.apply()
from dataclasses import dataclass
import phalanx
from tests.tasks import Digits

@dataclass
class Mine(Digits):
    steps: int = 2

with phalanx.Engine(Mine(), device="cpu") as engine:
    for batch in engine.batches():
        engine.step(batch)
if {bare}:
    sys.modules["cloudpickle"] = None
assert phalanx.prove(Mine(), ["dp=2"]).holds
"""


@pytest.mark.every
@pytest.mark.parametrize("bare", [False, True])
def test_a_notebooks_task_is_proven_after_its_engine_has_trained(bare: bool) -> None:
    pytest.importorskip("cloudpickle", reason="classes of a notebook are sent by cloudpickle")
    text = NOTEBOOK.format(root=str(Path(__file__).parents[2]), bare=bare)
    done = subprocess.run([sys.executable, "-"], input=text, capture_output=True, text=True, timeout=120)
    if bare:
        told = [line for line in done.stderr.splitlines() if line.startswith("phalanx.errors.")]
        assert "phalanx[notebook]" in told[-1], done.stderr
    else:
        assert done.returncode == 0, done.stderr


def test_messages_name_what_is_shared() -> None:
    lock = threading.Lock()
    with pytest.raises(WrongUse, match=r"cannot be sent to other processes: TypeError"):
        server().dumps(lock)
    assert loads(server().dumps({"a": [1, 2]})) == {"a": [1, 2]}
