"""A Ray cluster on this machine, for tests: a head and another node, each with processes of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray not installed (PyPI: ray[train,tune], or phalanx[ray])"
)
HOLDER = """
import sys
from ray.cluster_utils import Cluster

size = dict(num_cpus=1, num_gpus=0, object_store_memory=100 << 20)
cluster = Cluster(initialize_head=True, head_node_args=dict(size, include_dashboard=False))
others = [cluster.add_node(**size)]
print(cluster.address, flush=True)
for line in sys.stdin:
    if line == "add\\n":
        others.append(cluster.add_node(**size))
    else:
        cluster.remove_node(others.pop(), allow_graceful=False)
    print("done", flush=True)
cluster.shutdown()
"""
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_health_check_period_ms": "500", "OMP_NUM_THREADS": "1"}
"""A node that is lost is to be noticed soon."""


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


class RayNodes:
    """A head and another node, with room for one worker each. They are held by a process that ends with this one."""

    def __enter__(self) -> Self:
        self._holder = subprocess.Popen(
            ["setsid", "--fork", sys.executable, "-c", HOLDER], env=os.environ | ENVIRONMENT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._holder.wait()
        self.address = self._heard()
        return self

    def _heard(self) -> str:
        assert self._holder.stdout is not None
        while line := self._holder.stdout.readline():
            if line == "done\n" or line.strip().rpartition(":")[2].isdecimal():
                return line.strip()
        raise AssertionError("the cluster did not begin")

    def _tell(self, word: str) -> None:
        assert self._holder.stdin is not None
        self._holder.stdin.write(f"{word}\n")
        self._holder.stdin.flush()
        self._heard()

    def add(self) -> None:
        self._tell("add")

    def lose(self) -> None:
        """The node's daemon is killed, and with it all that it runs."""
        self._tell("lose")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.close()
        self._holder.stdout.read()
        self._holder.stdout.close()
