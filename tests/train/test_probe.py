"""A machine and its links are measured, and what was measured is read back."""

from __future__ import annotations

from pathlib import Path

from phalanx.cluster import Cluster, MeasuredLink
from phalanx.parallel.communication.links import PairSpeed
from phalanx.train import probe
from tests.hosts import Hosts, needs_namespaces
from tests.test_cli import phalanx


def test_this_machine_is_measured(tmp_path: Path) -> None:
    done = phalanx("probe", "--on", "local:2", "--device", "cpu", "--out", "cluster.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "cpux2*1 measured" in done.stdout
    assert "rank 0 to 1:" in done.stdout
    found = Cluster.read(tmp_path / "cluster.toml")
    assert (found.device, found.per_node, found.nodes, found.between) == ("cpu", 2, 1, None)
    assert found.flops > 1e6
    assert set(found.codecs) == {"bf16", "int8", "int4"}
    assert found.within is not None
    assert found.within.rate > 1e5
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.toml"]


@needs_namespaces
def test_a_slow_link_between_hosts_is_measured(tmp_path: Path) -> None:
    two = ("--on", "local:1", "--device", "cpu", "--max-nodes", "2", "--meet", "node1:29400", "--run", "run")
    with Hosts(2, tmp_path) as hosts:
        for name in hosts.names:
            hosts[name].tc("qdisc replace dev eth0 root tbf rate 200mbit burst 256kb latency 200ms")
        processes = [hosts[name].phalanx(tmp_path, "probe", *two, "--out", f"{name}.toml") for name in hosts.names]
        told = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], told
    (found,) = (Cluster.read(path) for path in tmp_path.glob("*.toml"))
    assert (found.per_node, found.nodes) == (1, 2)
    assert found.between is not None
    assert 1e6 < found.between.rate < 26e6  # of 25e6; less on a busy machine
    assert found.within is None


def test_the_slowest_link_counts() -> None:
    fast = PairSpeed((0, 1), 1e-4, {4096: 1e6, 1 << 23: 1e9}, {1 << 23: 9e8}, 8e8)
    slow = PairSpeed((0, 2), 2e-2, {4096: 1e3, 1 << 23: 1e7}, {1 << 23: 2e7}, 5e6)
    assert probe._slowest([fast, slow]) == MeasuredLink(2e-2, 1e7, 5e6)
    assert probe._slowest([]) is None
    assert probe._told_pair(slow).startswith(
        "rank 0 to 2: 20 ms; 4 KiB 0.008 Mbit/s, 8 MiB 80 Mbit/s; back 0.16 Gbit/s"
    )
