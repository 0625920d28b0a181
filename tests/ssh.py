"""Hosts with an ssh daemon each, for tests, and a desk from which they are reached: `tests.hosts` with real sshds."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from phalanx.launch.ssh import SshHost
from tests.hosts import Hosts, missing

SERVER = """\
ListenAddress {address}:22
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/user_key.pub
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
StrictModes no
UsePAM no
MaxStartups 100
SetEnv XDG_CACHE_HOME={folder}/cache-{name}
"""
CLIENT = """\
Host *
  User root
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
"""
MARK = "PHALANX_TEST_HOSTS"
"""A variable that every process of a test's runs has, with the test's folder."""


def _missing() -> str:
    if why := missing():
        return why
    tools = [tool for tool in ("ssh", "ssh-keygen") if shutil.which(tool) is None]
    tools += [] if Path("/usr/sbin/sshd").exists() else ["sshd"]
    return f"{', '.join(tools)} not installed (Debian: openssh-client, openssh-server)" if tools else ""


needs_ssh = pytest.mark.skipif(bool(_missing()), reason=_missing())


class SshHosts:
    """node1, node2 and so on with an sshd each; the last is the desk, which is no host of a run."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        *self.names, self.desk = hosts.names
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def prepare(self) -> None:
        """Keys, configurations, and a daemon a host."""
        for name in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name], check=True)
        (self.folder / "ssh_config").write_text(CLIENT.format(folder=self.folder))
        public = (self.folder / "host_key.pub").read_text()
        (self.folder / "known_hosts").write_text(f"* {public}")
        Path("/run/sshd").mkdir(exist_ok=True)
        for name in self.names:
            self.serve(name)

    def serve(self, name: str) -> None:
        """Start a host's daemon."""
        config = self.folder / f"sshd of {name}"
        config.write_text(SERVER.format(address=self.hosts.address(name), folder=self.folder, name=name))
        with (self.folder / f"sshd of {name}.log").open("ab") as log:
            words = [*self.inside(name), "/usr/sbin/sshd", "-D", "-e", "-f", str(config)]
            self.daemons[name] = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        while not self.ask(_answers, self.hosts.address(name)):
            assert self.daemons[name].poll() is None, (self.folder / f"sshd of {name}.log").read_text()
            time.sleep(0.1)

    def inside(self, name: str) -> list[str]:
        """The words that run a command on a host."""
        return ["nsenter", "--target", str(self.hosts[name].process.pid), "--net", "--uts", "--mount"]

    def start(self, *words: str, at: Path | None = None) -> subprocess.Popen[str]:
        """``phalanx`` with these words at the desk."""
        variables = os.environ | {
            "OMP_NUM_THREADS": "1", "PHALANX_SSH": f"ssh -F {self.folder / 'ssh_config'}", MARK: str(self.folder),
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        }  # fmt: skip
        inside = [*self.inside(self.desk), f"--wdns={at or self.folder}"]
        return subprocess.Popen(
            [*inside, sys.executable, "-m", "phalanx", *words], env=variables, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def processes(self) -> list[int]:
        """Of all hosts and the desk, those of this test's runs."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"{MARK}={self.folder}".encode() in (path / "environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
        return found

    def lose(self, name: str) -> None:
        """The host is gone: its daemon, and all that it runs."""
        daemon = self.daemons.pop(name)
        daemon.kill()
        daemon.wait()
        network = os.stat(f"/proc/{self.hosts[name].process.pid}/ns/net").st_ino
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (path / "ns/net").stat().st_ino == network and int(path.name) != self.hosts[name].process.pid:
                    os.kill(int(path.name), signal.SIGKILL)

    def remote(self, name: str, **more: Any) -> SshHost:
        """A host as a place has it."""
        given = {"ssh": ("ssh", "-F", str(self.folder / "ssh_config")), "python": sys.executable, **more}
        return SshHost(name, name, **given)

    def ask(self, function: Callable[..., Any], *args: Any) -> Any:
        """What a function returns at the desk."""
        return self.hosts[self.desk].ask(function, *args)

    def close(self) -> None:
        for name in list(self.daemons):
            self.lose(name)
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def ssh_hosts(folder: Path, number: int = 2) -> Iterator[SshHosts]:
    """So many hosts, and a desk."""
    with Hosts(number + 1, folder) as hosts:
        made = SshHosts(hosts, folder)
        try:
            made.prepare()
            yield made
        finally:
            made.close()


def _answers(address: str) -> bool:
    with suppress(OSError):
        socket.create_connection((address, 22), timeout=2).close()
        return True
    return False
