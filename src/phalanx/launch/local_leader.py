"""Processes that a launcher started on one host, one a rank: the first becomes the host's supervisor, the others wait.

So ranks are forked from a warm process, and again after a failure, under torchrun, srun and mpirun as everywhere. Those
who wait give the leader their cores, since some launchers bind each process to its own, and end as it ends. Where each
of them sees but a GPU of its own there is no leader: every process is on its own, as if it were a host.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from phalanx.errors import CannotHere
from phalanx.launch.lines import not_for_children
from phalanx.launch.started import Started
from phalanx.launch.stopping import HANDED_ON
from phalanx.words import many

PATIENCE_SECONDS = 120.0
"""For processes that were started together to find each other."""
WAIT, ALONE = b"w", b"a"
LONGEST = 1 << 16


@contextmanager
def led(started: Started | None, device: str | None = None) -> Iterator[Started | None]:
    """On the leader of a host and on a process that is on its own, what is to be run; elsewhere it ends as that ends.

    ``device``: what ranks are to compute on; None: GPUs if there are any.
    """
    if started is None or started.local_processes == 1:
        yield started
        return
    if sys.platform != "linux":
        raise CannotHere(f"processes that {started.by} starts find each other on Linux only. Use --on local:N.")
    if started.local:
        code = _wait(started)
        if code is not None:
            raise SystemExit(code)
        yield started.on_its_own()
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        others = _gather(door, started)
        alone = 0 < _gpus(device) < started.local_processes
        for other in others:
            with suppress(OSError):
                other.send(ALONE if alone else WAIT)
        code = 1
        try:
            yield started.on_its_own() if alone else started
            code = 0
        except BaseException as error:
            code = _code(error)
            raise
        finally:
            for other in others:
                with suppress(OSError):
                    other.send(bytes([code & 255]))
                other.close()


def _gpus(device: str | None) -> int:
    """How many this process sees, of those that it would use."""
    if device == "cpu":
        return 0
    import torch  # not for those who only wait

    return torch.cuda.device_count()


def _code(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return getattr(error, "exit_code", 130 if isinstance(error, KeyboardInterrupt) else 1)


def _place(started: Started) -> str:
    """Where they meet: a name, in no folder, that is gone with the process that has it."""
    job = hashlib.sha256(f"{os.getuid()} {started.name} {started.by} {started.job}".encode()).hexdigest()
    return f"\0phalanx {job}"


def _gather(door: socket.socket, started: Started) -> list[socket.socket]:
    """Connections to all others of this host; their cores become this process's too."""
    not_for_children(door)
    try:
        door.bind(_place(started))
    except OSError:
        raise CannotHere(
            f"another job that {started.by} started under the same name runs on this host. Wait for it, or give this "
            "one a name of its own (torchrun: --rdzv-id)."
        ) from None
    door.listen(started.local_processes)
    cores, found = os.sched_getaffinity(0), dict[int, socket.socket]()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(found) < started.local_processes - 1:
        door.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            other, _ = door.accept()
        except TimeoutError:
            missing = [str(number) for number in range(1, started.local_processes) if number not in found]
            raise CannotHere(
                f"{started.by} was to start {many(started.local_processes, 'process', 'processes')} on this host, and "
                f"number {', '.join(missing)} did not come in {PATIENCE_SECONDS:g} s. See whether it ended early."
            ) from None
        not_for_children(other)
        if _uid(other) == os.getuid():
            said = json.loads(other.recv(LONGEST))
            cores |= set(said["cores"])
            found[said["number"]] = other
        else:
            other.close()
    with suppress(OSError):  # what it may not have, it has not
        os.sched_setaffinity(0, cores)
    return list(found.values())


def _uid(other: socket.socket) -> int:
    """Whose process is at the other end."""
    return int(struct.unpack("3i", other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1])


def _wait(started: Started) -> int | None:
    """How the leader ended; None: there is no leader."""
    for number in HANDED_ON:  # it has got them too
        signal.signal(number, signal.SIG_IGN)
    deadline = time.monotonic() + PATIENCE_SECONDS
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        while line.connect_ex(_place(started)):
            if time.monotonic() > deadline:
                raise CannotHere(
                    f"the first process that {started.by} started on this host was not found in {PATIENCE_SECONDS:g} "
                    "s. See whether it ended early."
                )
            time.sleep(0.05)
        if _uid(line) != os.getuid():
            raise CannotHere("another user's process has the name by which those of this job meet. Start it again.")
        line.send(json.dumps({"number": started.local, "cores": sorted(os.sched_getaffinity(0))}).encode())
        if line.recv(1) == ALONE:
            for number in HANDED_ON:
                signal.signal(number, signal.SIG_DFL)
            return None
        end = line.recv(1)
    return end[0] if end else 1
