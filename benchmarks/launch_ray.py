"""On Ray, from nothing to the end of the first step: ``phalanx train --on ray`` against a TorchTrainer by hand.

Both start a Ray cluster on this machine and train the same model on two ranks. By hand these are two workers with
DistributedDataParallel; ours are one worker with two ranks, as on one machine, or two workers as on two nodes.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from report import Figure, report

BAR = 1.0
EXAMPLE = Path(__file__).parents[1] / "examples" / "spirals.py"
BY_HAND = """
import pathlib
import time

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model


def train(config):
    from spirals import Spirals

    task = Spirals()
    data, model = task.data(), prepare_model(task.model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate)
    rank, each = ray.train.get_context().get_world_rank(), task.global_batch // 2
    rows = [data[index] for index in range(rank * each, (rank + 1) * each)]
    x, y = (torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in ("x", "y"))
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    if rank == 0:
        pathlib.Path(config["folder"], "stepped").write_text(str(time.time()))


here = str(pathlib.Path.cwd())
ray.init(address="local", num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": PATH}})
TorchTrainer(
    train, train_loop_config={"folder": here}, scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=here),
).fit()
"""


def figures(quick: bool) -> Iterator[Figure]:
    sides = {"by hand": _by_hand, "ranks=2": _ours, "nodes=2": _ours}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(1 if quick else 3):
        for name, measure in sides.items():
            with tempfile.TemporaryDirectory() as place:
                seconds[name].append(measure(Path(place), name))
                print(f"{name}: {seconds[name][-1]:.1f} s", file=sys.stderr, flush=True)
    theirs = statistics.median(seconds["by hand"])
    for name in ("ranks=2", "nodes=2"):
        ratio = statistics.median(a / b for a, b in zip(seconds[name], seconds["by hand"], strict=True))
        note = f"{statistics.median(seconds[name]):.1f} s to {theirs:.1f} s"
        yield Figure(f"start-up, --on ray:{name} to the end of a step, to TorchTrainer by hand", ratio, BAR, note)


def _ours(folder: Path, on: str) -> float:
    shutil.copy(EXAMPLE, folder)
    words = ["train", "spirals.py", "--layout", "dp=2", "--on", f"ray:{on}", "--steps", "1", "--run", "run"]
    began = _run(folder, "-m", "phalanx", *words)
    for line in (folder / "run" / "events" / "rank-00000.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "step":
            return event["time"] - began
    raise AssertionError("there was no step")


def _by_hand(folder: Path, _: str) -> float:
    shutil.copy(EXAMPLE, folder)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    (folder / "by_hand.py").write_text(f"PATH = {path!r}\n{BY_HAND}")
    began = _run(folder, "by_hand.py")
    return float((folder / "stepped").read_text()) - began


def _run(folder: Path, *words: str) -> float:
    """When it began."""
    began = time.time()
    variables = os.environ | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, env=variables)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} left with {done.returncode}:\n{done.stdout}{done.stderr}")
    return began


if __name__ == "__main__":
    report(list(figures("--quick" in sys.argv)))
