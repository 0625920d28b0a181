"""What a cluster is asked for, and what goes wrong there, in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from phalanx.errors import CannotHere, WrongUse
from phalanx.launch.ray_trainer import QUIET, connected, imported, line, torch_trainer
from phalanx.launch.ray_worker import HostJob
from tests.ports import free_port
from tests.ray_nodes import needs_ray


def test_errors_are_one_line_without_secrets() -> None:
    assert line(RuntimeError("first.\n  second\n")) == "first"
    assert line(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert "hidden" not in line(RuntimeError("cannot open sftp://me:hidden@host/x"))


@pytest.mark.parametrize("address", ["here", "host:", "host:port"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(WrongUse, match="is not auto, HOST:PORT or ray://HOST:PORT"), connected(address, 1):
        pass


def test_nobody_at_an_address_is_told_at_once() -> None:
    port = free_port()
    told = f"nobody answers at address=127.0.0.1:{port}"
    with pytest.raises(CannotHere, match=told), connected(f"127.0.0.1:{port}", 1):
        pass


@needs_ray
def test_a_trainer_asks_for_what_a_host_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "1")
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # which importing Ray sets
    job = HostJob(("train", "gpt"), str(tmp_path), str(tmp_path / "run"), str(tmp_path))
    made = torch_trainer(job, 3, {"CPU": 8, "GPU": 8})
    assert (made.scaling_config.num_workers, made.scaling_config.use_gpu) == (3, True)
    assert made.scaling_config.resources_per_worker == {"CPU": 8, "GPU": 8}
    assert (made.run_config.name, made.run_config.storage_path) == ("run", str(tmp_path))
    assert made.run_config.failure_config.max_failures == -1


def test_without_ray_its_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in QUIET:
        monkeypatch.setenv(name, "1")
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.train", None)
    with pytest.raises(CannotHere, match=r"Install it: pip install 'phalanx\[ray\]'"):
        imported()
