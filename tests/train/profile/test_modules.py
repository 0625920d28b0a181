"""Time and FLOPs by module under layouts: as one device has them, and the numbers of the run unchanged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx import Run
from tests.test_cli import phalanx

GPT = ("gpt", "--set", "width=32", "--set", "layers=4", "--set", "length=16", "--set", "megabytes=0.05", "--unchecked")
WIDTH, TOKENS = 32, 16 * 16
PRODUCT = 2 * 3 * WIDTH * WIDTH * TOKENS
"""Of a square linear in a step: forward, and two in backward."""


def table(folder: Path, run: str, *words: str) -> tuple[dict[str, Any], str]:
    done = phalanx("train", *GPT, "--steps", "4", *words, "--run", run, cwd=folder)
    assert done.returncode == 0, done.stderr
    text = (folder / run / "profile" / "modules.txt").read_text()
    assert text in done.stdout
    assert not (folder / run / "profile" / "modules").exists()
    return json.loads((folder / run / "profile" / "modules.json").read_text()), text


@pytest.mark.parametrize("layout", ["dp=1", "fsdp=2,zero=3", "fsdp=2,pp=2,micro_batch=4,recompute=full", "tp=2"])
def test_flops_are_those_of_the_model(tmp_path: Path, layout: str) -> None:
    found, text = table(tmp_path, "seen", "--layout", layout, "--profile", "modules")
    rows = {row["name"]: row for row in found["modules"]}
    again = "recompute" in layout
    for block in range(4):
        row = rows[f"blocks.{block}.attention.q_proj"]
        assert row["forward_flops"] + row["backward_flops"] == PRODUCT * (4 / 3 if again else 1)
        assert row["weights"] == WIDTH * WIDTH
        assert row["forward_ms"] > 0
        assert row["backward_ms"] > 0
        assert bool(row["recomputed"]) == again
    parts = [row for name, row in rows.items() if name.startswith("blocks.") and name.count(".") == 1]
    assert sum(row["backward_flops"] for row in parts) == rows[""]["backward_flops"]
    assert found["outside_flops"] == PRODUCT * 256 / WIDTH  # the lazy head's, which the loss computes
    assert found["step"] == 3
    assert "4 x Block" in text
    assert "blocks.*" in text


def test_the_numbers_of_the_run_are_the_same(tmp_path: Path) -> None:
    words = ("--layout", "fsdp=2,zero=3,recompute=selective")
    table(tmp_path, "seen", *words, "--profile", "modules@2")
    done = phalanx("train", *GPT, "--steps", "4", *words, "--run", "unseen", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    seen, unseen = (
        [(event["loss"], event["grad_norm"]) for event in Run(tmp_path / run).ledger().values()]
        for run in ("seen", "unseen")
    )
    assert seen == unseen


def test_a_run_that_goes_on_with_that_step_says_what_it_did_not_count(tmp_path: Path) -> None:
    done = phalanx("train", *GPT, "--layout", "fsdp=2", "--steps", "2", "--run", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = phalanx("train", "--resume", "--run", "run", "--steps", "4", "--profile", "modules", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "FLOPs were not counted: the run began or went on with this very step" in done.stdout
    assert json.loads((tmp_path / "run" / "profile" / "modules.json").read_text())["modules"][0]["forward_ms"] > 0


def test_a_rank_that_is_killed_does_not_cost_what_was_counted(tmp_path: Path) -> None:
    words = ("--layout", "fsdp=2", "--memory-steps", "1", "--kill", "1@3", "--profile", "modules")
    _, text = table(tmp_path, "run", *words)
    assert "not counted" not in text


COMPILED = """
import sys
from functools import partial
from pathlib import Path
import torch
from torch import nn
import phalanx
from phalanx.train.options import Options
from phalanx.train.profile.attached import profiled
from phalanx.watch.module_table import conclude_modules
from tests.tasks import Digits

class Blocks(Digits):
    def model(self):
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
        return nn.Sequential(*blocks, nn.Linear(4, 3))

torch.set_num_threads(1)
torch.compile = partial(torch.compile, backend="aot_eager")  # traced as ever; C++ kernels would take half a minute
with phalanx.Engine(Blocks(steps=4), "dp=1,compile=blocks", device="cpu") as engine:
    with profiled(Options(profile="modules"), engine, phalanx.Run(sys.argv[1]), 1, lambda: None, print):
        engine.callbacks.call("on_start", engine)
        for batch in engine.batches():
            engine.step(batch)
print(conclude_modules(Path(sys.argv[1])))
"""


def test_compiled_blocks_are_timed_as_wholes(tmp_path: Path) -> None:
    """In a process of its own: the compiler leaves threads behind."""
    done = subprocess.run([sys.executable, "-c", COMPILED, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "FLOPs are not counted with compile=blocks" in done.stdout
    names = [row["name"] for row in json.loads((tmp_path / "profile" / "modules.json").read_text())["modules"]]
    assert names == ["", "0", "1", "2"]
