"""A Slurm cluster on this machine, for tests: munge, a controller, and a daemon a node, all with files of their own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
CONFIGURATION = """\
ClusterName=test
FirstJobId={ports[0]}00
SlurmctldHost={host}
SlurmctldAddr=127.0.0.1
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
KillWait=10
OverTimeLimit=0
SlurmdTimeout=10
InactiveLimit=0
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=8
PartitionName=urgent Nodes=n[1-2] MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""


def _missing() -> str:
    if not (hasattr(os, "geteuid") and os.geteuid() == 0):
        return "only root can run a Slurm cluster"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"{', '.join(missing)} not installed (Debian: slurmctld slurmd slurm-client munge)" if missing else ""


needs_slurm = pytest.mark.skipif(bool(_missing()), reason=_missing())


class SlurmCluster:
    """Two nodes, n1 and n2, of two cores each; partitions main and urgent, which preempts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        munge = self.folder / "munge"
        for made in (munge, self.folder / "state"):
            made.mkdir()
        munge.chmod(0o755)
        (munge / "key").write_bytes(os.urandom(1024))
        (munge / "key").chmod(0o600)
        configuration = CONFIGURATION.format(folder=self.folder, host=socket.gethostname(), ports=list(_free_ports(3)))
        (self.folder / "slurm.conf").write_text(configuration)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        try:
            self._start(
                "munged", "--foreground", "--force", *(f"--{name}={munge / file}" for name, file in files.items())
            )
            until(lambda: (munge / "socket").exists())
            self._start("slurmctld", "-D", "-i")
            for node in ("n1", "n2"):
                self.start(node)
            until(lambda: "idle 2" in self.told("sinfo", "-h", "-p", "main", "-o", "%t %D"))
        except BaseException:
            self._close()
            raise
        return self

    def _start(self, *words: str, name: str = "") -> None:
        out = (self.folder / f"{name or words[0]}.out").open("ab")
        with out:
            self._daemons[name or words[0]] = subprocess.Popen(
                words, stdout=out, stderr=out, env=os.environ | self.environment, start_new_session=True
            )

    def start(self, node: str) -> None:
        self._start("slurmd", "-D", "-N", node, name=node)

    def lose(self, node: str) -> None:
        """The node's daemon is killed, and all that it runs."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()
        marks = {f"SLURMD_NODENAME={node}".encode(), f"SLURM_CONF={self.folder / 'slurm.conf'}".encode()}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if marks <= set((path / "environ").read_bytes().split(b"\0")):
                    parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                    if (Path("/proc") / str(parent) / "comm").read_text().startswith("slurmstepd"):
                        os.kill(parent, signal.SIGKILL)
                    os.kill(int(path.name), signal.SIGKILL)

    def told(self, *words: str) -> str:
        """What a command of Slurm's says."""
        done = subprocess.run(words, capture_output=True, text=True, env=os.environ | self.environment)
        return done.stdout

    def _close(self) -> None:
        self.told("scancel", "--user", "root")
        with suppress(AssertionError):
            until(lambda: not self.told("squeue", "-h").strip(), seconds=20)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()


def _free_ports(number: int) -> Iterator[int]:
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    for each in taken:
        yield each.getsockname()[1]
    for each in taken:
        each.close()


def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not in {seconds:g} s"
        time.sleep(0.1)
