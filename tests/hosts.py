"""Hosts on this machine, for tests: each is a network, a host name and an /etc/hosts of its own, joined by a switch.

A host is a process that does nothing but hold its namespaces: when it ends, however it ends, the kernel takes them and
their links away. So nothing has a name that a second run of the tests could meet, and nothing can be left behind.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from phalanx.launch.forkserver import Forked
from phalanx.processes import die_with_parent
from tests.forking import fork

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
LIBC = ctypes.CDLL(None, use_errno=True)


def missing() -> str:
    """Why hosts cannot be made here; "": they can."""
    if not (hasattr(os, "geteuid") and os.geteuid() == 0):
        return "only root can make network namespaces"
    tools = [tool for tool in ("ip", "nsenter") if shutil.which(tool) is None]
    if tools:
        return f"{' and '.join(tools)} not installed (Debian: iproute2, util-linux)"
    if subprocess.run(["nsenter", "--net=/proc/self/ns/net", "ip", "link"], capture_output=True).returncode:
        return "namespaces cannot be entered here"
    return ""


needs_namespaces = pytest.mark.skipif(bool(missing()), reason=missing())


def descendants(pid: int) -> list[int]:
    """A process and all below it."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def _checked(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _hold(name: str, table: Path | None, ready: Any) -> None:
    """A host's own network, name and /etc/hosts, for as long as this process lives."""
    die_with_parent()
    _checked(LIBC.unshare(CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWNS))
    _checked(LIBC.sethostname(name.encode(), len(name)))
    _checked(LIBC.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    if table is not None:
        _checked(LIBC.mount(bytes(table), b"/etc/hosts", None, MS_BIND, None))
    ready.set()
    signal.pause()


def on_host(pid: int, function: Callable[..., None], args: tuple[Any, ...], *descriptors: int) -> None:
    """Run a function with the namespaces of another process."""
    for kind in ("net", "uts", "mnt"):
        handle = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
        _checked(LIBC.setns(handle, 0))
        os.close(handle)
    function(*args, *descriptors)


def _answer(function: Callable[..., Any], args: tuple[Any, ...], pipe: int) -> None:
    with Connection(pipe) as connection:
        try:
            connection.send(function(*args))
        except Exception as error:
            connection.send(error)


def _mount_empty(folder: Path) -> None:
    _checked(LIBC.mount(b"none", bytes(folder), b"tmpfs", 0, None))


class Host:
    """One host: its process holds the namespaces, and others enter them."""

    def __init__(self, name: str, table: Path | None = None) -> None:
        self.name = name
        context = multiprocessing.get_context("fork")
        ready = context.Event()
        self.process = context.Process(target=_hold, args=(name, table, ready))
        self.process.start()
        assert ready.wait(20), f"host {name} could not be made"
        self.ip("link set lo up")

    def ip(self, words: str) -> str:
        """What ``ip`` says or does in this host's network."""
        return self._network("ip", words)

    def tc(self, words: str) -> str:
        """Likewise ``tc``, which makes links slow."""
        return self._network("tc", words)

    def _network(self, tool: str, words: str) -> str:
        command = ["nsenter", f"--net=/proc/{self.process.pid}/ns/net", tool, *words.split()]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{tool} {words}: {done.stderr}"
        return done.stdout

    def start(self, function: Callable[..., None], *args: Any, descriptors: tuple[int, ...] = ()) -> Forked:
        """A function in a process of its own on this host."""
        return fork(on_host, self.process.pid, function, args, descriptors=descriptors)

    def ask(self, function: Callable[..., Any], *args: Any) -> Any:
        """What a function returns on this host, or the exception that it raises."""
        ours, theirs = multiprocessing.Pipe(duplex=False)
        with ours:
            with theirs:
                process = self.start(_answer, function, args, descriptors=(theirs.fileno(),))
            assert ours.poll(60), "no answer"
            answer = ours.recv()
        process.join()
        return answer

    def phalanx(
        self, folder: Path, *words: str, under: tuple[str, ...] = (), variables: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """A command line of ours on this host, with an interpreter of its own; ``under``: what starts that."""
        kinds = {"net": "net", "uts": "uts", "mount": "mnt"}
        enter = (f"--{kind}=/proc/{self.process.pid}/ns/{short}" for kind, short in kinds.items())
        return subprocess.Popen(
            ["nsenter", *enter, f"--wd={folder}", *under, sys.executable, "-m", "phalanx", *words], text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", **(variables or {})}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip

    def hide(self, folder: Path) -> None:
        """Let this host see an empty folder of its own there."""
        folder.mkdir(exist_ok=True)
        failed = self.ask(_mount_empty, folder)
        assert failed is None, failed

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()


class Hosts:
    """So many hosts, node1, node2 and so on, at 10.77.0.1, 10.77.0.2 and so on, whose own names mean 127.0.1.1.

    With ``ipv6`` they are at fd77::1 and so on and have no other address, but those of loopback.
    """

    def __init__(self, number: int, folder: Path, ipv6: bool = False) -> None:
        self.names = [f"node{place}" for place in range(1, number + 1)]
        self.ipv6, self.folder = ipv6, folder
        self._made: list[Host] = []

    def address(self, name: str) -> str:
        return f"{'fd77::' if self.ipv6 else '10.77.0.'}{self.names.index(name) + 1}"

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self._close()
            raise
        return self

    def _make(self) -> None:
        self.switch = Host("switch")
        self._made.append(self.switch)
        self.switch.ip("link add hub type bridge")
        self.switch.ip("link set hub up")
        for name in self.names:
            table = self.folder / f"hosts of {name}"
            known = {other: self.address(other) for other in self.names if other != name}
            table.write_text(
                "".join(f"{at} {who}\n" for who, at in {"localhost": "127.0.0.1", name: "127.0.1.1", **known}.items())
            )
            host = Host(name, table)
            self._made.append(host)
            self.switch.ip(f"link add {name} type veth peer name eth0 netns {host.process.pid}")
            self.switch.ip(f"link set {name} master hub up")
            host.ip(f"addr add {self.address(name)}/{64 if self.ipv6 else 24} dev eth0{' nodad' * self.ipv6}")
            host.ip("link set eth0 up")

    def __getitem__(self, name: str) -> Host:
        return self._made[1 + self.names.index(name)]

    def cut(self, name: str) -> None:
        """No packet comes or goes any more, and nobody is told."""
        self.switch.ip(f"link set {name} nomaster")

    def mend(self, name: str) -> None:
        self.switch.ip(f"link set {name} master hub")

    def _close(self) -> None:
        for host in reversed(self._made):
            host.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
