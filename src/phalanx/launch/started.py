"""Who started this process, and which of how many it is: read off what torchrun, Slurm, MPI and clouds set.

Some start one process a rank, others one a host. Either way one process a host is its supervisor (``local_leader``).
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from phalanx.errors import CannotHere, WrongUse
from phalanx.launch.place import place_of
from phalanx.run import short_name
from phalanx.words import many

PORTS = range(20_000, 32_000)
"""Where hosts of a job meet, by its name: below the ports that systems give away by themselves."""
Variables = Mapping[str, str]


@dataclass(frozen=True)
class Started:
    """One process among those that somebody started together."""

    by: str
    """For people: ``torchrun``."""
    job: str
    """What the others have too, and other jobs on these hosts have not."""
    processes: int
    process: int
    local_processes: int
    """On this host."""
    local: int
    """Which of those it is."""
    hosts: int
    first: str = ""
    """A name or an address of the first host, if it is known."""
    name: str = ""
    """This host's among them; by default its own."""
    ranks: int = 0
    """For each host, where that is said by who starts one process a host; 0: as many as there are processes."""
    folder: str = ""
    """Ends the name of a run's folder that all hosts find by themselves; "": none that they would."""

    def __post_init__(self) -> None:
        if not (0 <= self.process < self.processes and 0 <= self.local < self.local_processes and self.hosts > 0):
            raise CannotHere(
                f"{self.by} says that this is process {self.process} of {self.processes}, number {self.local} of "
                f"{self.local_processes} on one of {many(self.hosts, 'host')}, which cannot be. Start it with "
                f"{self.by} again, or unset its variables to run alone."
            )

    @classmethod
    def detect(cls, variables: Variables = os.environ) -> Started | None:
        """None: nobody did, or this process alone."""
        for read in _READERS:
            found = read(variables)
            if found is not None:
                return found if found.processes > 1 or found.ranks else None
        return None

    @classmethod
    def unless_placed(cls, on: str | None) -> Started | None:
        """Likewise; a job for a place is started once, not by each of several processes."""
        if place_of(on) is None:
            return cls.detect()
        with suppress(CannotHere):  # variables that mean nothing here
            found = cls.detect()
            if found is not None and (found.local_processes > 1 or found.process):
                raise WrongUse(
                    f"{found.by} has started {many(found.processes, 'process', 'processes')}, and each would start a "
                    f"run by --on {on}. Leave --on out to have them train together, or start phalanx in one of them."
                )
        return None

    def on_its_own(self) -> Self:
        """As if this process were on a host of its own."""
        own = f"{self.name or socket.gethostname()}.{self.local}"
        return replace(self, local_processes=1, local=0, hosts=self.processes, name=own)

    def over(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Options of ``phalanx train``, and those that follow from this where none are given."""
        options = dict(given)
        if self.local_processes > 1:
            if options.get("on") is not None:
                raise WrongUse(
                    f"{self.by} has started {many(self.local_processes, 'process', 'processes')} on this host, a rank "
                    f"each: --on {options['on']} says something else. Leave it out, or start one process a host."
                )
            options["on"] = f"local:{self.local_processes}"
        elif options.get("on") is None and (self.ranks or options.get("layout") is None):
            options["on"] = f"local:{self.ranks or 1}"
        if self.hosts == 1:
            return options
        for name, value in (("max_nodes", self.hosts), ("min_nodes", self.hosts), ("host", self.name or None)):
            options[name] = value if options.get(name) is None else options[name]
        if options.get("meet") is None:
            if not self.first:
                raise WrongUse(
                    f"{self.by} has started {many(self.hosts, 'host')} and does not say where they meet. Give "
                    "--meet HOST:PORT of one of them, or set MASTER_ADDR to its name."
                )
            options["meet"] = f"{f'[{self.first}]' if ':' in self.first else self.first}:{self.port}"
        if options.get("run") is None and self.folder:
            options["run"] = Path("runs") / f"{short_name(options['task'] or 'run')}-{self.folder}"
        return options

    @property
    def port(self) -> int:
        return PORTS[zlib.crc32(self.job.encode()) % len(PORTS)]


def _torchrun(variables: Variables) -> Started | None:
    if "TORCHELASTIC_RUN_ID" not in variables:
        return None
    world, local = _number(variables, "WORLD_SIZE"), _number(variables, "LOCAL_WORLD_SIZE")
    job = f"torchrun {variables['TORCHELASTIC_RUN_ID']} {variables.get('MASTER_PORT')}"
    return Started(
        "torchrun", job, world, _number(variables, "RANK"), local, _number(variables, "LOCAL_RANK"),
        _number(variables, "GROUP_WORLD_SIZE", -(-world // local)), variables.get("MASTER_ADDR", ""),
    )  # fmt: skip


MPI = {
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                 "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "MVAPICH": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
                "MV2_COMM_WORLD_LOCAL_SIZE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "jsrun": ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
}  # fmt: skip
"""How those call a process's number, how many there are, and both on its host. Intel's MPI is MPICH in this."""


def _mpi(variables: Variables) -> Started | None:
    for by, names in MPI.items():
        if all(name in variables for name in names):
            rank, size, local_rank, local_size = (_number(variables, name) for name in names)
            job = variables.get("PMIX_NAMESPACE") or variables.get("LSB_JOBID") or f"of process {_manager()}"
            hosts = _number(variables, "OMPI_MCA_orte_num_nodes", -(-size // local_size))
            first = _first_of_mpi(variables)
            return Started(by, f"{by} {job}", size, rank, local_size, local_rank, hosts, first)
    return None


def _first_of_mpi(variables: Variables) -> str:
    """MPI itself does not say; who gave it the hosts may have."""
    for name in ("MASTER_ADDR", "AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE", "LSB_MCPU_HOSTS"):
        if words := variables.get(name, "").split():
            return words[0].partition(":")[0]
    if "PBS_NODEFILE" in variables:
        with open(variables["PBS_NODEFILE"]) as lines:
            return next(lines, "").strip()
    return _first_host(variables.get("SLURM_JOB_NODELIST", ""))


def _manager() -> int:
    """The process of MPICH's that started those of this host; scripts may stand between."""
    above = os.getppid()
    while above > 1:
        try:
            name, _, rest = Path(f"/proc/{above}/stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            break
        if "hydra" in name or "pmi_proxy" in name:
            return above
        above = int(rest.split()[1])
    return os.getppid()


def _slurm(variables: Variables) -> Started | None:
    if "SLURM_STEP_ID" not in variables or "SLURM_PROCID" not in variables:
        return None  # the script of a batch job is no process of a step
    tasks = list(_counts(variables.get("SLURM_STEP_TASKS_PER_NODE", "1")))
    node, job = _number(variables, "SLURM_NODEID"), variables["SLURM_JOB_ID"]
    here = tasks[node] if node < len(tasks) else 0
    first = _first_host(variables.get("SLURM_STEP_NODELIST", ""))
    return Started(
        "srun", f"Slurm {job}.{variables['SLURM_STEP_ID']}", sum(tasks), _number(variables, "SLURM_PROCID"), here,
        _number(variables, "SLURM_LOCALID"), len(tasks), _slurm_address(first) if len(tasks) > 1 else first,
        variables.get("SLURMD_NODENAME", ""), folder=f"slurm-{job}",
    )  # fmt: skip


def _slurm_address(node: str) -> str:
    """A node's name, or what Slurm reaches it by if the name is Slurm's alone."""
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        with suppress(OSError):
            told = subprocess.run(["scontrol", "-o", "show", "node", node], capture_output=True, text=True).stdout
            if found := re.search(r"\bNodeAddr=(\S+)", told):
                return found[1]
    return node


def _counts(text: str) -> Iterator[int]:
    """Slurm's ``2(x3),1``: 2, 2, 2, 1."""
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        yield from [int(count)] * int(times or 1)


def _first_host(hosts: str) -> str:
    """Of Slurm's ``gpu[07-09,12],cpu1``: ``gpu07``."""
    name, _, rest = hosts.partition("[")
    if "," in name or not rest:
        return name.partition(",")[0]
    inside, _, after = rest.partition("]")
    return name + re.split("[-,]", inside)[0] + after.partition(",")[0]


def _kubeflow(variables: Variables) -> Started | None:
    """Kubeflow's trainer: one process a pod, told what torchrun would be told."""
    if "PET_NNODES" not in variables or "PET_NODE_RANK" not in variables:
        return None
    nodes = _number({"PET_NNODES": variables["PET_NNODES"].rpartition(":")[2]}, "PET_NNODES")
    each = variables.get("PET_NPROC_PER_NODE", "1")
    first = variables.get("PET_MASTER_ADDR") or variables.get("MASTER_ADDR", "")
    ranks = int(each) if each.isdecimal() else 0
    node = _number(variables, "PET_NODE_RANK")
    return Started("Kubeflow", f"Kubeflow {first}", nodes, node, 1, 0, nodes, first, ranks=ranks)


def _sagemaker(variables: Variables) -> Started | None:
    if "SM_HOSTS" not in variables or "SM_CURRENT_HOST" not in variables:
        return None
    hosts, here = sorted(_json(variables, "SM_HOSTS")), variables["SM_CURRENT_HOST"]
    return _one_a_host("SageMaker", hosts, here, _number(variables, "SM_NUM_GPUS", 0))


def _skypilot(variables: Variables) -> Started | None:
    if "SKYPILOT_NODE_IPS" not in variables or "SKYPILOT_NODE_RANK" not in variables:
        return None
    hosts = variables["SKYPILOT_NODE_IPS"].split()
    number = _number(variables, "SKYPILOT_NODE_RANK")
    gpus = int(float(variables.get("SKYPILOT_NUM_GPUS_PER_NODE") or 0))
    here = hosts[number] if number < len(hosts) else ""
    return _one_a_host("SkyPilot", hosts, here, gpus)


def _vertex(variables: Variables) -> Started | None:
    if "CLUSTER_SPEC" not in variables:
        return None
    said = _json(variables, "CLUSTER_SPEC")
    pools = said.get("cluster", {})
    hosts = [host for pool in sorted(pools) for host in pools[pool]]
    task = said.get("task", {})
    here = pools.get(task.get("type"), [""])[int(task.get("index", 0))]
    plain = [host.rpartition(":")[0] or host for host in hosts]
    return _one_a_host("Vertex AI", plain, here.rpartition(":")[0] or here, 0)


def _one_a_host(by: str, hosts: list[str], here: str, ranks: int) -> Started:
    if here not in hosts:
        raise CannotHere(f"{by} does not list this host, {here or 'unnamed'}, among {', '.join(hosts)}. Start it anew.")
    return Started(by, f"{by} {hosts[0]}", len(hosts), hosts.index(here), 1, 0, len(hosts), hosts[0], here, ranks)


def _plain(variables: Variables) -> Started | None:
    """Whoever sets what torchrun sets, as Azure ML and many scripts do: one process a rank."""
    if not (variables.get("RANK") and variables.get("WORLD_SIZE") and variables.get("LOCAL_RANK")):
        return None
    world, rank, local = (_number(variables, name) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"))
    here = variables.get("LOCAL_WORLD_SIZE") or variables.get("AZUREML_PROCESS_COUNT_PER_NODE")
    first = variables.get("MASTER_ADDR", "")
    if not here:
        raise CannotHere(
            f"RANK={rank} WORLD_SIZE={world} do not say how many processes this host has. Set LOCAL_WORLD_SIZE too, or "
            "unset RANK to run alone."
        )
    each = _number(variables, "LOCAL_WORLD_SIZE", int(here) if here.isdecimal() else 0)
    job = f"{first}:{variables.get('MASTER_PORT')}"
    return Started("RANK and WORLD_SIZE", job, world, rank, each, local, max(1, -(-world // max(each, 1))), first)


_READERS: tuple[Callable[[Variables], Started | None], ...] = (
    _torchrun, _mpi, _slurm, _kubeflow, _sagemaker, _skypilot, _vertex, _plain,
)  # fmt: skip
"""What starts processes inside of another's allocation comes first."""


def _number(variables: Variables, name: str, otherwise: int | None = None) -> int:
    text = variables.get(name) or ("" if otherwise is None else str(otherwise))
    if not re.fullmatch("[0-9]{1,9}", text):
        raise CannotHere(f"{name}={text} is no number. Start again with what sets it, or unset it to run alone.")
    return int(text)


def _json(variables: Variables, name: str) -> Any:
    try:
        return json.loads(variables[name])
    except ValueError:
        raise CannotHere(f"{name} is not JSON. Start again with what sets it, or unset it to run alone.") from None
