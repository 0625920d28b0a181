"""What is wrong with hosts is named before anything is started, each with its host, on real hosts over a real ssh."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx import CannotHere
from phalanx.launch.host_check import HostCheck
from phalanx.user_code import file_hash
from tests.hosts import MS_BIND
from tests.ssh import SshHosts, needs_ssh, ssh_hosts

PYTHON = """\
#!/bin/sh
[ "$(hostname)" = node2 ] && exec faketime -f {offset} {python} "$@"
exec {python} "$@"
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    """Three hosts and a desk."""
    with ssh_hosts(tmp_path_factory.mktemp("hosts"), 3) as made:
        (made.folder / "task.py").write_text("x = 1\n")
        yield made


def checked(cluster: SshHosts, names: str = "node1 node2", meet: bool = False, **more: Any) -> tuple[str, str]:
    """The table, and what is refused."""
    folder = cluster.folder
    python = more.pop("python", sys.executable)
    files = {str(folder / "task.py"): file_hash(folder / "task.py") or ""}
    remotes = [cluster.remote(name, python=python, ranks=more.get("ranks", 1)) for name in names.split()]
    more.pop("ranks", None)
    given = {"gpus": 0, "folder": folder, "run": folder / "run", "files": files, **more}
    ports = given.pop("ports", [29400])
    path = [entry for entry in sys.path if entry]
    return cluster.ask(_checked, HostCheck(remotes, path=path, **given), ports if meet else None)


def _checked(check: HostCheck, ports: list[int] | None) -> tuple[str, str]:
    check.look()
    if ports:
        check.meet("node1", ports)
    try:
        check.refuse()
    except CannotHere as error:
        return check.table(), str(error)
    return check.table(), "copy" if check.copy else ""


def _bind(new: str, over: str) -> None:
    done = ctypes.CDLL(None, use_errno=True).mount(new.encode(), over.encode(), None, MS_BIND, None)
    assert not done, os.strerror(ctypes.get_errno())


def _unbind(over: str) -> None:
    assert not ctypes.CDLL(None).umount2(over.encode(), 2)


@needs_ssh
def test_hosts_that_are_alike_take_part(cluster: SshHosts) -> None:
    table, refused = checked(cluster, "node1 node2 node3", meet=True)
    assert refused == ""
    for name in ("node1", "node2", "node3"):
        line = next(line for line in table.splitlines() if name in line)
        assert f"torch {torch.__version__}" in line
        assert line.endswith("ok")
    assert not (cluster.folder / "run").exists(), "a mark was left"


@needs_ssh
def test_everything_that_is_wrong_is_named_at_once(cluster: SshHosts) -> None:
    """A version, another file, no interpreter's room, GPUs that are not there, a host that does not answer."""
    version = Path(torch.__file__).parent / "version.py"
    other = cluster.folder / "version.py"
    other.write_text("__version__ = '1.0.0'\n")
    (cluster.folder / "changed.py").write_text("x = 2\n")
    cluster.hosts["node2"].ask(_bind, str(other), str(version))
    cluster.hosts["node3"].ask(_bind, str(cluster.folder / "changed.py"), str(cluster.folder / "task.py"))
    try:
        table, refused = checked(cluster, "node1 node2 node3 node4", gpus=1, ranks=1 << 20)
    finally:
        cluster.hosts["node2"].ask(_unbind, str(version))
        cluster.hosts["node3"].ask(_unbind, str(cluster.folder / "task.py"))
    assert "4 hosts cannot take part" in refused
    assert "Nothing was started." in refused
    for told in (
        f"node2: has torch 1.0.0, and here it is {torch.__version__}. Install the same.",
        "node3: holds something else in task.py than is here. Bring that up to date",
        "node4: is not reached over ssh: ssh: connect to host node4 port 22: Connection refused",
        "node1: has 0 GPUs, and gpus=1 asks for more",
        "of memory free, and 256.0 TiB are needed",
    ):
        assert told in refused
    assert "node1: has torch" not in refused
    assert all(line.endswith("!") for line in table.splitlines())


@needs_ssh
@pytest.mark.skipif(shutil.which("faketime") is None, reason="faketime not installed (Debian: faketime)")
@pytest.mark.parametrize(
    ("offset", "told"), [("+1d", "s ahead"), pytest.param("-1d", "s behind", marks=pytest.mark.every)]
)
def test_a_clock_that_is_off_is_named_with_by_how_much(cluster: SshHosts, offset: str, told: str) -> None:
    wrapper = cluster.folder / "python"
    wrapper.write_text(PYTHON.format(python=sys.executable, offset=offset))
    wrapper.chmod(0o755)
    _, refused = checked(cluster, python=str(wrapper))
    assert "node2: its clock is 86," in refused
    assert told in refused
    assert "node1" not in refused


@needs_ssh
def test_an_interpreter_that_is_not_there(cluster: SshHosts) -> None:
    _, refused = checked(cluster, python="/opt/nowhere/python")
    assert "node1: has no /opt/nowhere/python: " in refused
    assert "Name the interpreter there with python=." in refused


def _hold(port: int) -> None:
    taken = socket.create_server(("10.77.0.1", port))
    time.sleep(60)
    taken.close()


@needs_ssh
def test_a_port_that_is_taken_and_a_folder_that_is_not_shared(cluster: SshHosts) -> None:
    holder = cluster.hosts["node1"].start(_hold, 29411)
    cluster.hosts["node2"].hide(cluster.folder / "own")
    try:
        time.sleep(0.5)
        _, refused = checked(cluster, meet=True, run=cluster.folder / "own", ports=[29411])
        assert "node1: port 29411 is taken (Address already in use). Give another with port=." in refused
        assert f"node2: does not see what host node1 writes to {cluster.folder / 'own'}, or cannot" in refused
        assert "Give --run a folder that all hosts share, or --checkpoints" in refused
        kept = {"run": cluster.folder / "own", "checkpoints": str(cluster.folder / "kept")}
        assert checked(cluster, meet=True, ports=[29411, 29412], **kept)[1] == "", "that is enough"
    finally:
        holder.kill()
        holder.join()


@needs_ssh
@pytest.mark.every
def test_a_port_that_others_do_not_reach(cluster: SshHosts) -> None:
    node1 = cluster.hosts["node1"]
    node1.ip("route add blackhole 10.77.0.3/32")  # as a firewall between the two
    try:
        _, refused = checked(cluster, "node1 node2 node3", meet=True)
    finally:
        node1.ip("route del blackhole 10.77.0.3/32")
    assert "node3: does not reach host node1 at node1:29400" in refused
    assert "node2" not in refused


@needs_ssh
def test_code_that_is_not_there_is_to_be_sent(cluster: SshHosts) -> None:
    assert checked(cluster, folder=Path("/nowhere/to/be/found"))[1] == "copy"
