"""On Slurm, from nothing to the end of the first step: ``--on slurm`` against sbatch and torchrun by hand.

    python benchmarks/launch_slurm.py [--quick]

Both train the same model on two nodes with a rank each, of a Slurm cluster on this machine (Debian: slurmctld, slurmd,
slurm-client, munge; as root). By hand it is DistributedDataParallel under torchrun, in a job script.
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

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.slurm import SlurmCluster

from report import Figure, report

BAR = 1.0
EXAMPLE = Path(__file__).parents[1] / "examples" / "spirals.py"
SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --output=by_hand.out
srun --export=ALL {python} -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d \\
  --rdzv-id $SLURM_JOB_ID --rdzv-endpoint 127.0.0.1:29517 by_hand.py
"""
BY_HAND = """
import pathlib
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from spirals import Spirals

dist.init_process_group("gloo")
task, rank = Spirals(), dist.get_rank()
torch.manual_seed(0)
data, model = task.data(), DistributedDataParallel(task.model())
optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate)
each = task.global_batch // 2
rows = [data[index] for index in range(rank * each, (rank + 1) * each)]
x, y = (torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in ("x", "y"))
torch.nn.functional.cross_entropy(model(x), y).backward()
optimizer.step()
if rank == 0:
    pathlib.Path("stepped").write_text(str(time.time()))
dist.destroy_process_group()
"""


def figures(quick: bool) -> Iterator[Figure]:
    ratios, ours, theirs = [], [], []
    with tempfile.TemporaryDirectory() as place, SlurmCluster(Path(place)) as cluster:
        for _ in range(2 if quick else 7):
            ours.append(_ours(cluster))
            theirs.append(_by_hand(cluster))
            ratios.append(ours[-1] / theirs[-1])
            print(f"{ours[-1]:.1f} s, by hand {theirs[-1]:.1f} s", file=sys.stderr, flush=True)
    note = f"{statistics.median(ours):.1f} s to {statistics.median(theirs):.1f} s"
    name = "start-up, --on slurm:nodes=2 to the end of a step, to sbatch and torchrun by hand"
    yield Figure(name, statistics.median(ratios), BAR, note)


def _ours(cluster: SlurmCluster) -> float:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        shutil.copy(EXAMPLE, folder)
        words = ["train", "spirals.py", "--layout", "dp=2", "--on", "slurm:nodes=2", "--steps", "1", "--run", "run"]
        began = time.time()
        done = subprocess.run(
            [sys.executable, "-m", "phalanx", *words], cwd=folder, env=_variables(cluster), capture_output=True
        )
        if done.returncode:
            raise SystemExit(f"{done.stdout.decode()}{done.stderr.decode()}")
        for line in (folder / "run" / "events" / "rank-00000.jsonl").read_text().splitlines():
            event = json.loads(line)
            if event["kind"] == "step":
                return event["time"] - began
    raise AssertionError("there was no step")


def _by_hand(cluster: SlurmCluster) -> float:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        shutil.copy(EXAMPLE, folder)
        (folder / "by_hand.py").write_text(BY_HAND)
        (folder / "job.sh").write_text(SCRIPT.format(python=sys.executable))
        began = time.time()
        subprocess.run(["sbatch", "--wait", "job.sh"], cwd=folder, env=_variables(cluster), capture_output=True)
        if not (folder / "stepped").exists():
            raise SystemExit((folder / "by_hand.out").read_text())
        return float((folder / "stepped").read_text()) - began


def _variables(cluster: SlurmCluster) -> dict[str, str]:
    return os.environ | cluster.environment | {"OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    report(list(figures("--quick" in sys.argv)))
