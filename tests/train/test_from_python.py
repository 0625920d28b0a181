"""``phalanx.train`` from a script and a notebook: the result in hand, mistakes as exceptions, nothing left behind."""

from __future__ import annotations

import itertools
import os
import queue
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx
from phalanx import WrongUse
from tests.conftest import children
from tests.launch.test_slurm import weights
from tests.tasks import Digits
from tests.test_cli import phalanx as shell
from tests.test_recovery import TASK


def test_a_run_and_what_came_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.ones(1, requires_grad=True).sum().backward()  # the process may have computed
    trained = phalanx.train(Digits(steps=4), "fsdp=2", on="local:2", run=tmp_path / "run", device="cpu")
    assert trained.verdict.holds
    assert len(trained.losses) == 4
    assert all(isinstance(weight, torch.Tensor) for weight in trained.weights().values())
    assert "trained Digits for 4 steps" in repr(trained)
    told = capsys.readouterr().out
    assert "step 4/4" in told
    assert "trained Digits for 4 steps" in told
    longer = phalanx.train(Digits(steps=6), "dp=1", run=tmp_path / "run", resume=True, device="cpu")
    assert len(longer.losses) == 6


def test_a_run_by_epochs_takes_their_steps(tmp_path: Path) -> None:
    task = Digits(epochs=2, samples=40, global_batch=8)
    trained = phalanx.train(task, run=tmp_path / "run", device="cpu", quiet=True)
    assert trained.verdict.holds
    assert len(trained.losses) == 10
    assert task.steps == Digits.steps, "the caller's task is as it was"
    task.epochs = 3
    assert len(phalanx.train(task, run=tmp_path / "run", resume=True, device="cpu", quiet=True).losses) == 15


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"layout": "dp=3", "on": "local:2"}, "needs 3 ranks and there are 2"),
        ({"save_step": 3}, "save_step is no option of phalanx.train"),
        ({"resume": True}, "does not say which run goes on"),
        ({"on": "slurm:nodes=2"}, "is not this machine"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(WrongUse, match=told):
        phalanx.train(Digits(), **options)
    with pytest.raises(WrongUse, match="is no task"):
        phalanx.train(Digits)


class Broken(Digits):
    """Whose second loss cannot be computed."""

    def loss(self, output: torch.Tensor, batch: dict[str, torch.Tensor]) -> phalanx.Loss:
        if os.environ.get("RANK") is not None and next(CALLS):
            raise ArithmeticError("broken")
        return super().loss(output, batch)


CALLS = itertools.count()


def test_what_a_rank_refuses_is_raised_here(tmp_path: Path) -> None:
    with pytest.raises((WrongUse, phalanx.CannotHere), match="nothing"):
        phalanx.train(Digits(steps=2), run=tmp_path / "run", device="cpu", init_from=str(tmp_path / "nothing"))
    with pytest.raises(phalanx.RunFailed, match=r"broken(.|\n)*phalanx.train\(\.\.\., run=") as failed:
        phalanx.train(Broken(steps=4), run=tmp_path / "broken", device="cpu", unchecked=True)
    assert not failed.value.trained.verdict.holds
    with pytest.raises(WrongUse, match="the run is not finished"):
        failed.value.trained.weights()


def test_a_script_without_a_guard_is_not_run_by_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TASK + "phalanx.train(Slow(steps=2))\n")
    done = shell("train", "script.py", "--run", "run", cwd=tmp_path)
    assert done.returncode == 2
    assert "script.py calls phalanx.train while it is imported for its task. Put that under if __name__" in done.stderr
    assert not (tmp_path / "runs").exists()


class Notebook:
    """A kernel, as Jupyter runs it."""

    def __init__(self, folder: Path) -> None:
        manager = pytest.importorskip("jupyter_client.manager", reason="no Jupyter (pip install ipykernel)")
        pytest.importorskip("ipykernel", reason="no Jupyter (pip install ipykernel)")
        self.manager, self.client = manager.start_new_kernel(cwd=str(folder))

    def start(self, cell: str) -> None:
        self.client.execute(cell)

    def output(self, until: str = "", seconds: float = 120.0) -> str:
        """What the cell prints, to its end or until it has printed something."""
        told, deadline = "", time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                told += content["text"]
            elif message["msg_type"] == "error":
                told += "\n".join(content["traceback"])
            elif message["msg_type"] == "execute_result":
                told += content["data"]["text/plain"]
            elif message["msg_type"] == "status" and content["execution_state"] == "idle" and told:
                return told
            if until and until in told:
                return told
        raise AssertionError(f"the cell did not end: {told}")

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


def test_a_notebook_trains_to_the_same_bits_and_is_interrupted(tmp_path: Path) -> None:
    before = children()
    notebook = Notebook(tmp_path)
    try:
        notebook.start(TASK + "torch.ones(1, requires_grad=True).sum().backward()\nprint('ready')")
        notebook.output()
        given = "Slow(steps=8), on='local:2', device='cpu', run='theirs', kill='1@4'"
        notebook.start(f"r = phalanx.train({given})\nlen(r.losses)")
        told = notebook.output()
        assert "trained Slow for 8 steps" in told
        assert "\r" in told  # a line that renews itself
        assert told.rstrip().endswith("8")
        notebook.start("phalanx.train(Slow(steps=5000), on='local:2', device='cpu', run='long')")
        notebook.output(until="samples/s")
        notebook.manager.interrupt_kernel()
        told = notebook.output()
        assert "stopped: every rank has ended, saved up to step" in told
        assert "Go on with phalanx.train(..., run='long', resume=True)" in told
        assert "KeyboardInterrupt" in told
        assert len(children() - before) <= 2  # the kernel, and perhaps what watches its children
    finally:
        notebook.close()
    (tmp_path / "slow.py").write_text(TASK)
    words = ("slow.py", "--steps", "8", "--device", "cpu", "--on", "local:2", "--run", "ours")
    assert shell("train", *words, cwd=tmp_path).returncode == 0
    assert weights(tmp_path, "theirs") == weights(tmp_path, "ours")
