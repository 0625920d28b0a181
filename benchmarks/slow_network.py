"""Hosts on this machine that are joined by a slow network: so many Mbit/s each way, and so long a round trip.

The rate is a token bucket (``tc tbf``) on both ends of each host's link. Kernels often have nothing that delays
packets, so a round trip is made by a relay: a process that hands frames from host to host, each when its time has come,
and loses as many of them as it is told to.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import json
import multiprocessing
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from tests.hosts import LIBC, Host, Hosts

from phalanx.processes import die_with_parent

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
CLONE_NEWNET = 0x40000000
MTU = 9000
"""Of relayed links: fewer frames leave more of the processor to the ranks."""
INTERFACE = "eth0"
PORT = 29_611
"""Of the ranks' rendezvous, in networks of their own."""


def _tap(pid: int) -> int:
    """A network device ``eth0`` of the host that this process holds, and this end of it."""
    with open(f"/proc/{pid}/ns/net") as network:
        if LIBC.setns(network.fileno(), CLONE_NEWNET):
            raise OSError(f"the network of process {pid} cannot be entered")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", INTERFACE.encode(), IFF_TAP | IFF_NO_PI))
    return device


class _Relay:
    """Frames on their way between hosts: each leaves after the delay, and when its receiver's link is free."""

    def __init__(self, pids: list[int], delay: float, rate: Any, loss: float) -> None:
        """``rate``: bits a second of each host's link, a value shared with who changes it; 0: as fast as it goes.

        ``loss``: the share of frames that do not arrive.
        """
        self.devices, self.delay, self.rate, self.loss = [_tap(pid) for pid in pids], delay, rate, loss
        self.known: dict[bytes, int] = {}
        """By hardware address, the device that leads to it."""
        self.free = dict.fromkeys(self.devices, 0.0)
        self.waiting: list[tuple[float, int, int, bytes]] = []
        self.number = 0

    def run(self) -> None:
        while True:
            wait = None if not self.waiting else max(0.0, self.waiting[0][0] - time.monotonic())
            for device in select.select(self.devices, [], [], wait)[0]:  # to the microsecond: others would spin
                self._take(device)
            now = time.monotonic()
            while self.waiting and self.waiting[0][0] <= now:
                _, _, to, frame = heapq.heappop(self.waiting)
                with contextlib.suppress(OSError):  # its host is not ready, or gone
                    os.write(to, frame)

    def _take(self, device: int) -> None:
        now = time.monotonic()
        for _ in range(64):
            try:
                frame = os.read(device, MTU + 64)
            except BlockingIOError:
                return
            if self.loss and random.random() < self.loss:
                continue
            to, self.known[frame[6:12]] = self.known.get(frame[:6]), device
            for receiver in [to] if to is not None else [other for other in self.devices if other != device]:
                rate = self.rate.value
                leaves = max(now + self.delay, self.free[receiver])
                self.free[receiver] = leaves + (8 * len(frame) / rate if rate else 0.0)
                self.number += 1
                heapq.heappush(self.waiting, (leaves, self.number, receiver, frame))


def _relaying(pids: list[int], delay: float, rate: Any, loss: float, ready: Any) -> None:
    die_with_parent()
    with contextlib.suppress(PermissionError):
        os.nice(-10)  # a network does not wait for the processor of its hosts
    relay = _Relay(pids, delay, rate, loss)
    ready.set()
    relay.run()


class SlowNetwork:
    """So many hosts, 10.77.0.1, 10.77.0.2 and so on, for as long as it is entered."""

    def __init__(
        self, hosts: int, folder: Path, mbits: float = 0, round_trip: float = 0, loss: float = 0, congestion: str = ""
    ) -> None:
        """``mbits``: a second, of each host's link, each way; 0: unshaped. ``round_trip``: seconds.

        ``loss``: the share of frames that are lost on such a way. ``congestion``: the algorithm of TCP's, if not this
        machine's own.
        """
        assert round_trip or not loss, "frames are lost on links with a round trip"
        self.number, self.mbits, self.round_trip, self.loss, self.congestion = (
            hosts,
            mbits,
            round_trip,
            loss,
            congestion,
        )
        self._hosts = None if round_trip else Hosts(hosts, folder)
        self._relay: Any = None
        self._rate = multiprocessing.get_context("fork").Value("d", 0.0)
        self.holders: list[Host] = []
        self._switch_pid = 0

    def __enter__(self) -> Self:
        if self._hosts is not None:
            self._hosts.__enter__()
            self.holders = [self._hosts[name] for name in self._hosts.names]
        else:
            self.holders = [Host(f"node{place + 1}") for place in range(self.number)]
            context = multiprocessing.get_context("fork")
            ready, pids = context.Event(), [host.process.pid for host in self.holders]
            self._relay = context.Process(
                target=_relaying, args=(pids, self.round_trip / 2, self._rate, self.loss, ready)
            )
            self._relay.start()
            assert ready.wait(20), "the relay did not start"
            for place, host in enumerate(self.holders):
                host.ip(f"addr add 10.77.0.{place + 1}/24 dev {INTERFACE}")
                host.ip(f"link set {INTERFACE} mtu {MTU} txqueuelen 10000 up")
        for place in range(self.number) if self.congestion else ():
            setting = f"net.ipv4.tcp_congestion_control={self.congestion}"
            subprocess.run([*self._enter(place), "sysctl", "-qw", setting], check=True)
        self.shape(self.mbits)
        return self

    def shape(self, mbits: float) -> None:
        """From now on so many Mbit/s; 0: as fast as it goes."""
        self._rate.value = mbits * 1e6
        ends = [(host, INTERFACE) for host in self.holders]
        if self._hosts is not None:
            ends += [(self._hosts.switch, name) for name in self._hosts.names]
        for host, device in ends:
            if mbits:
                burst = max(256, round(mbits))  # kilobytes: a millisecond's worth and more
                host.tc(f"qdisc replace dev {device} root tbf rate {mbits}mbit burst {burst}kb latency 200ms")
            else:
                with contextlib.suppress(AssertionError):  # there is none
                    host.tc(f"qdisc del dev {device} root")

    def cut(self, place: int) -> None:
        """No packet comes to this host or goes from it any more, and nobody is told: on links without a round trip."""
        assert self._hosts is not None
        self._hosts.cut(self.holders[place].name)

    def mend(self, place: int) -> None:
        assert self._hosts is not None
        self._hosts.mend(self.holders[place].name)

    def _enter(self, place: int) -> list[str]:
        """What a command is to begin with, to run on a host."""
        return ["nsenter", f"--net=/proc/{self.holders[place].process.pid}/ns/net"]

    def start(self, place: int, words: Sequence[str], **how: Any) -> subprocess.Popen[bytes]:
        """A command on a host, which ends with this process at the latest."""
        return subprocess.Popen([*self._enter(place), *words], preexec_fn=die_with_parent, **how)

    @contextlib.contextmanager
    def ranks(self, file: str, words: Any, each: int = 1) -> Iterator[list[subprocess.Popen[bytes]]]:
        """So many ranks on each host that run a benchmark with these words for ``--rank-of``; ended on leaving."""
        made = [
            self.start(
                rank // each, [sys.executable, file, "--rank-of", json.dumps(words)],
                env=os.environ | {
                    "RANK": str(rank), "WORLD_SIZE": str(each * self.number), "LOCAL_RANK": str(rank % each),
                    "LOCAL_WORLD_SIZE": str(each), "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(PORT),
                    "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1",
                },
            )
            for rank in range(each * self.number)
        ]  # fmt: skip
        try:
            yield made
        finally:
            for process in made:
                process.kill()
                process.wait()

    def __exit__(self, *_: Any) -> None:
        if self._hosts is not None:
            self._hosts.__exit__(None, None, None)
            return
        for process in [self._relay]:
            process.kill()
            process.join()
        for host in self.holders:
            host.close()


def wait_for(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until all have come to their end, or one has failed."""
    if any(process.wait() for process in ranks):
        raise SystemExit("a rank has failed: see above")


def bytes_sent() -> int:
    """By this host's link, as its interface counts them."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, colon, numbers = line.partition(":")
        if colon and name.strip() == INTERFACE:
            return int(numbers.split()[8])
    return 0
