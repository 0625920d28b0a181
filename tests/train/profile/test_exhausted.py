"""A rank without memory leaves what held it, by part, and its failure names the file."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import pytest
import torch

import phalanx
from phalanx import Run
from phalanx.train.profile.exhausted import is_exhausted, memory_told
from tests.ranks import Ranks
from tests.tasks import Digits
from tests.test_cli import GOOD, main, run_forked
from tests.test_cli import phalanx as command

GREEDY = GOOD.replace(
    "    def loss(self, output: Tensor, batch: dict[str, Any]) -> Any:\n",
    """    def loss(self, output: Tensor, batch: dict[str, Any]) -> Any:
        Digits.calls = getattr(Digits, "calls", 0) + 1
        if Digits.calls > 3:
            kept = torch.zeros(1 << 20)
            output = output + torch.zeros(1 << BITS).sum() + kept.sum()
""",
)


def test_a_task_that_asks_for_too_much(tmp_path: Path) -> None:
    (tmp_path / "greedy.py").write_text(GREEDY.replace("BITS", "46"))
    done = command("train", "greedy.py", "--on", "local:2", "--unchecked", "--run", "run", cwd=tmp_path)
    assert done.returncode == 1
    named = [line.strip() for line in done.stderr.splitlines() if "what held the memory" in line]
    rank = named[0].split()[6]
    assert named[0] == f"what held the memory of rank {rank} is in run/profile/memory-rank-{rank}.txt"
    text = (tmp_path / "run" / "profile" / f"memory-rank-{rank}.txt").read_text()
    assert f"rank {rank} on " in text.splitlines()[0]
    assert "had no memory left in step 3" in text  # an evaluation is rehearsed before
    parts = {
        line.rsplit("  ", 1)[0].strip(): line.rsplit("  ", 1)[1].strip() for line in text.splitlines() if "  " in line
    }
    assert parts["weights"] == "524 B"  # 4 x 16, 16, 16 x 3 and 3 of 4 bytes
    assert parts["gradients"] == "524 B"
    assert parts["the optimizer's moments"] == "1.04 KiB"
    assert "4 MiB  float32 [1048576] on cpu" in text
    assert "0.weight" in text
    assert text.rstrip().endswith("keeps.")


def limited(*words: str) -> None:
    """The command line with 3 GiB more of addresses than it has now."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (3 << 30), now + (3 << 30)))
    main(*words)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux has /proc")
def test_a_limit_of_the_systems_is_met(tmp_path: Path) -> None:
    (tmp_path / "greedy.py").write_text(GREEDY.replace("BITS", "31"))
    done = run_forked(limited, "train", "greedy.py", "--unchecked", "--run", "run", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "what held the memory of rank 0 is in run/profile/memory-rank-0.txt" in done.stderr


def test_data_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "greedy.py").write_text(
        GOOD.replace("        return self._points(self.samples, 0)", "        return torch.ones(1 << 46)")
    )
    done = command("train", "greedy.py", "--unchecked", "--run", "run", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "what held the memory of rank 0 is in run/profile/memory-rank-0.txt" in done.stderr
    text = (tmp_path / "run" / "profile" / "memory-rank-0.txt").read_text()
    assert "while the model and its data were made" in text


def of_sites(folder: Path) -> str:
    with phalanx.Engine(Digits(steps=4), "dp=2,comm=diloco:2", device="cpu") as engine:
        engine.step(next(engine.batches()))
        with pytest.raises(MemoryError), memory_told(Run(folder), engine.rank, engine):
            raise MemoryError
        return (folder / "profile" / f"memory-rank-{engine.rank}.txt").read_text()


def test_what_sites_keep_is_among_it(ranks: Ranks, tmp_path: Path) -> None:
    for text in ranks(2, of_sites, tmp_path):
        assert re.search(r"what sites have agreed on, and have on its way +[1-9]", text)


def test_what_cannot_be_told_is_no_secret(tmp_path: Path) -> None:
    (tmp_path / "profile").touch()
    with pytest.raises(MemoryError) as caught, memory_told(Run(tmp_path), 0):
        raise MemoryError
    assert caught.value.__notes__[0].startswith("what held the memory of rank 0 could not be told: BadFile")


def test_other_errors_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), memory_told(Run(tmp_path), 0):
        raise KeyError("x")
    assert not list(tmp_path.iterdir())
    assert is_exhausted(MemoryError())
    assert is_exhausted(torch.OutOfMemoryError("CUDA out of memory."))
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(1 << 46)
    assert is_exhausted(caught.value)
    assert not is_exhausted(RuntimeError("shape"))
