"""Clusters: what this machine offers, and what it does not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from phalanx import CannotHere, Cluster, WrongUse
from phalanx.cluster import MeasuredLink, cores, threads


def test_this_machine_as_a_cluster() -> None:
    cluster = Cluster.here(4, "cpu")
    assert (str(cluster), cluster.world, cluster.backend) == ("cpux4*1", 4, "gloo")
    assert cluster.describe() == "4 ranks on this machine's CPU"
    assert Cluster("cuda", 1).describe() == "1 rank on this machine's GPU"
    assert Cluster("cuda", 4, 2).describe() == "8 ranks on GPUs, 4 on each of 2 hosts"
    assert cluster.memory_bytes > 0
    assert not torch.cuda.is_initialized(), "counting devices must leave the process fit to fork"


def test_more_ranks_than_could_ever_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Cluster.here(64, "cpu").check_room()
    with pytest.raises(CannotHere, match=r"99999 ranks were asked for .* Ask for \d+ or fewer"):
        Cluster.here(99999, "cpu").check_room()
    monkeypatch.delattr("os.sched_getaffinity", raising=False)  # as on macOS
    assert cores() == os.cpu_count()


def test_threads_are_what_openmp_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, number in {"": 7, "3": 3, "4,2": 4, " 5 , 1": 5, ",2": 7}.items():
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert threads(7) == number
    for text in ("0", "-1", "x", "2.5", "²", "9" * 40):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        with pytest.raises(WrongUse, match="is no number of threads"):
            threads(7)


def test_devices_that_are_not_here_are_refused() -> None:
    with pytest.raises(CannotHere, match="this machine has"):
        Cluster.here(1000, "cuda")
    with pytest.raises(WrongUse, match="not known"):
        Cluster.here(1, "tpu")


def test_what_was_measured_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    known = Cluster(
        "cuda",
        8,
        2,
        80 << 30,
        5e14,
        {"bf16": 1e12, "int8": 9e11},
        MeasuredLink(1e-6, 4e11, 3e11),
        MeasuredLink(1e-5, 5e10, 4e10),
    )
    path.write_text(known.to_toml())
    assert Cluster.read(path) == known
    path.write_text(Cluster("cpu", 2).to_toml())
    assert Cluster.read(path) == Cluster("cpu", 2)


def test_a_file_that_describes_no_cluster_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    with pytest.raises(WrongUse, match=r"is not there\. Write it with phalanx probe"):
        Cluster.read(path)
    for text in ("[cluster]\ncolour = 3\n", "cluster", "[links]\n"):
        path.write_text(text)
        with pytest.raises(WrongUse, match="describes no cluster"):
            Cluster.read(path)
