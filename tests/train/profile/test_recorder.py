"""Steps under torch's profiler: one trace of all ranks on one clock, and the same numbers as without."""

from __future__ import annotations

import gzip
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from phalanx import Run
from tests.test_cli import GOOD, Done, phalanx

GPT = ("gpt", "--set", "width=32", "--set", "layers=4", "--set", "length=16", "--set", "megabytes=0.05", "--unchecked")


class Trace:
    """A merged trace, read back."""

    def __init__(self, path: Path) -> None:
        with gzip.open(path, "rt") as file:
            self.events: list[dict[str, Any]] = json.load(file)["traceEvents"]
        self.names = {e["pid"]: e["args"]["name"] for e in self.events if e["name"] == "process_name"}

    def ranges(self, begin: str, pid: int | None = None) -> list[dict[str, Any]]:
        every = (e for e in self.events if e["ph"] == "X" and e["name"].startswith(begin))
        return sorted((e for e in every if pid in (None, e["pid"])), key=lambda e: e["ts"])


def trained(folder: Path, run: str, *words: str) -> Done:
    done = phalanx("train", *words, "--run", run, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done


def losses(run: Path) -> list[tuple[float, float]]:
    return [(event["loss"], event["grad_norm"]) for event in Run(run).ledger().values()]


def test_two_ranks_in_one_trace_and_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GOOD)
    words = ("mine.py", "--layout", "fsdp=2", "--steps", "4", "--unchecked")
    done = trained(tmp_path, "seen", *words, "--profile", "2:3")
    trained(tmp_path, "unseen", *words)
    assert losses(tmp_path / "seen") == losses(tmp_path / "unseen")
    final = [(tmp_path / run / "final" / "model.safetensors").read_bytes() for run in ("seen", "unseen")]
    assert final[0] == final[1]

    folder = tmp_path / "seen" / "profile"
    assert sorted(path.name for path in folder.iterdir()) == ["steps-2-3.json.gz", "steps-2-3.txt"]
    trace = Trace(folder / "steps-2-3.json.gz")
    assert [name.partition(" on ")[0] for _, name in sorted(trace.names.items())] == ["rank 0", "rank 1"]
    for pid in trace.names:
        assert [e["name"] for e in trace.ranges("step ", pid)] == ["step 2", "step 3"]
        phases = {e["name"].removeprefix("phase: ") for e in trace.ranges("phase: ", pid)}
        assert phases == {"data", "forward", "backward", "reduce", "update"}
        for phase in trace.ranges("phase: ", pid):  # each inside a step
            assert any(_inside(phase, step) for step in trace.ranges("step ", pid)), phase
        waits = {e["name"] for e in trace.ranges("wait: ", pid)}
        assert {"wait: fsdp all-gather", "wait: fsdp reduce-scatter"} <= waits
        assert any(e["name"].startswith("launch: fsdp all-gather, ") for e in trace.ranges("launch: ", pid))
        assert any(e["cat"] == "cpu_op" and e["name"] == "aten::mm" for e in trace.ranges("aten::mm", pid))
    one, other = (trace.ranges("step ", pid) for pid in trace.names)
    for mine, theirs in zip(one, other, strict=True):  # steps are the same moments: one waits for the other
        assert max(mine["ts"], theirs["ts"]) < min(mine["ts"] + mine["dur"], theirs["ts"] + theirs["dur"])

    said = (folder / "steps-2-3.txt").read_text()
    assert said in done.stdout
    for words_ in ("profile of steps 2 to 3 on 2 ranks of 2 (fsdp=2)", "fsdp all-gather", "slowest: rank ", "aten::"):
        assert words_ in said
    assert "profile" not in tomllib.loads((tmp_path / "seen" / "run.toml").read_text())["run"]


def _inside(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    slack = 1.0
    return bool(outer["ts"] - slack <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + slack)


def test_some_ranks_of_a_pipeline(tmp_path: Path) -> None:
    words = (*GPT, "--layout", "fsdp=2,pp=2,micro_batch=4", "--steps", "3")
    done = trained(tmp_path, "run", *words, "--profile", "2:3@1,2-3")
    trace = Trace(tmp_path / "run" / "profile" / "steps-2-3.json.gz")
    named = [name.partition(" on ")[0] for _, name in sorted(trace.names.items())]
    assert named == ["rank 1", "rank 2", "rank 3"]
    assert "on 3 ranks of 4" in done.stdout
    waits = {e["name"] for e in trace.ranges("wait: pp")}
    assert {"wait: pp forward receive", "wait: pp backward receive"} <= waits
    assert trace.ranges("phase: wait")
    ids = [(e["cat"], e["id"]) for e in trace.events if e["ph"] == "s"]
    assert len(ids) == len(set(ids)), "an arrow of one rank leads to another's"


@pytest.mark.parametrize(("kill", "begins"), [("1@3", 3), ("1@4", 3)])
def test_a_rank_that_is_killed_meanwhile(tmp_path: Path, kill: str, begins: int) -> None:
    (tmp_path / "mine.py").write_text(GOOD)
    words = ("mine.py", "--layout", "fsdp=2", "--unchecked", "--memory-steps", "2", "--kill", kill)
    done = trained(tmp_path, "run", *words, "--profile", "3:4")
    trace = Trace(tmp_path / "run" / "profile" / "steps-3-4.json.gz")
    assert len(trace.names) == 2
    assert {e["name"] for e in trace.ranges("step ")} == {"step 3", "step 4"}
    assert "ranks were started again once" in done.stdout


def test_a_run_that_ends_meanwhile_leaves_what_was_done(tmp_path: Path) -> None:
    ends = "    def callbacks(self):\n        return [phalanx.EarlyStopping(patience=1)]\n"
    settings = {"evaluate_every: int": "2", "learning_rate: float": "0.0"}
    fields = "".join(f"    {name} = {value}\n" for name, value in settings.items())
    (tmp_path / "mine.py").write_text(
        GOOD.replace("    learning_rate: float = 1e-2\n", fields).replace(
            "    def model(self)", f"{ends}\n    def model(self)", 1
        )
    )
    words = ("mine.py", "--on", "local:2", "--steps", "20", "--unchecked")
    done = trained(tmp_path, "run", *words, "--profile", "4:15")
    assert "profile of steps 4 to 5 on 2 ranks of 2" in done.stdout
    never = trained(tmp_path, "never", *words, "--profile", "10:12")
    assert "nothing was profiled: the run ended after 5 steps, before step 10" in never.stdout
    assert not (tmp_path / "never" / "profile").exists()


@pytest.mark.gpu
def test_a_gpu_is_seen(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GOOD)
    done = trained(tmp_path, "run", "mine.py", "--device", "cuda", "--unchecked", "--profile", "3:5")
    trace = Trace(tmp_path / "run" / "profile" / "steps-3-5.json.gz")
    assert any(e.get("cat") == "kernel" for e in trace.events)
    assert any(name.endswith("GPU 0") for name in trace.names.values())
    assert "GPUs stood idle" in done.stdout
    trained(tmp_path, "ranges", "mine.py", "--device", "cuda", "--unchecked", "--profile", "nvtx")
    by_module = trained(tmp_path, "modules", "mine.py", "--device", "cuda", "--unchecked", "--profile", "modules")
    assert "profile by module of step 3" in by_module.stdout
