"""What a launcher tells a rank."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from phalanx import CannotHere
from phalanx.launch.environment import Environment
from tests.hosts import Hosts, needs_namespaces


def test_alone_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Environment.detect() == Environment(0, 1, 0)
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "host", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert Environment.detect() == Environment(3, 8, 3)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert Environment.detect() == Environment(3, 8, 1)
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(CannotHere, match="MASTER_PORT is not"):
        Environment.detect()


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK"])
def test_a_variable_that_is_no_number_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "host", "MASTER_PORT": "1", "LOCAL_RANK": "1"}
    for text in ("x", "-1", "²", "1.5"):
        for variable, value in (told | {name: text}).items():
            monkeypatch.setenv(variable, value)
        with pytest.raises(CannotHere, match=f"{name}={text} is no number"):
            Environment.detect()


def test_empty_variables_are_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")
    assert Environment.detect() == Environment(0, 1, 0)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(CannotHere, match="WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not"):
        Environment.detect()
    for name, value in {"WORLD_SIZE": "1", "MASTER_ADDR": "host", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CannotHere, match="RANK=1 is not below WORLD_SIZE=1"):
        Environment.detect()


def test_a_rank_without_a_gpu_says_so() -> None:
    with pytest.raises(CannotHere, match="GPUs"):
        Environment(9, 10, 9).device("cuda")


def _rank(rank: int) -> tuple[float, str]:
    """What torchrun tells a rank, of two hosts with one each."""
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "node1",
        "MASTER_PORT": "29500",
    }  # fmt: skip
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.pop(name, None)
    environment = Environment.detect()
    assert environment.join(torch.device("cpu"))
    total = torch.tensor(1.0 + rank)
    dist.all_reduce(total)
    environment.leave()
    return float(total), os.environ["GLOO_SOCKET_IFNAME"]


@needs_namespaces
@pytest.mark.parametrize("ipv6", [False, True])
def test_the_interface_that_reaches_torchruns_store_is_used(tmp_path: Path, ipv6: bool) -> None:
    """On the store's own host its name means loopback; the other host knows better."""
    found = {}
    with Hosts(2, tmp_path, ipv6) as hosts:
        threads = [
            threading.Thread(target=lambda rank=rank, name=name: found.update({name: hosts[name].ask(_rank, rank)}))
            for rank, name in enumerate(hosts.names)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {"node1": (3.0, "eth0"), "node2": (3.0, "eth0")}
