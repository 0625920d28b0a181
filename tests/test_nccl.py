"""Several NCCL ranks on one GPU, each on a host of its own as NCCL sees it: one dies or stops, and no bit is lost."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from phalanx import Run, cli
from phalanx.launch import heartbeats
from phalanx.launch.forkserver import Forked
from phalanx.watch.why import why
from tests.forking import fork, printing_into
from tests.nccl import as_host
from tests.ports import free_port
from tests.test_recovery import TASK, ended, ranks_of, same, until_step
from tests.watch import faults

DEVICE, HOSTS = "cuda", "abcd"
Calm = Callable[[str], Run]

ASLEEP = """
import os
from pathlib import Path


@dataclass
class Asleep(Slow):
    def inputs(self, batch):
        if Path("sleep").exists() and os.environ["NCCL_HOSTID"] == "host-b":
            Path("sleep").rename("slept")
            time.sleep(1e6)
        return super().inputs(batch)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "slow.py").write_text(TASK + ASLEEP)
    return tmp_path


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """The run of a layout that is left alone."""

    @cache
    def run(layout: str) -> Run:
        folder = tmp_path_factory.mktemp("calm")
        (folder / "slow.py").write_text(TASK)
        check(started(folder, "calm", layout, "--set", "pause=0"), folder)
        return Run(folder / "calm")

    return run


def _main(words: list[str], cwd: Path, host: str) -> None:
    os.chdir(cwd)
    os.environ.update(as_host(host))
    heartbeats.LEAST_SECONDS = 5.0
    printing_into(f"out of {host}")
    sys.argv = ["phalanx", "train", *words]
    cli.main()


def started(folder: Path, run: str, layout: str, *more: str, task: str = "slow.py:Slow") -> dict[str, Forked]:
    """One rank a host, all on the one GPU."""
    address = f"127.0.0.1:{free_port()}"
    words = [
        task, "--layout", layout, "--device", DEVICE, "--on", "local:1", "--run", run, "--meet", address,
        "--max-nodes", str(len(HOSTS)), "--min-nodes", str(len(HOSTS)), "--memory-steps", "2", "--save-steps", "5",
        "--set", "steps=24", *more,
    ]  # fmt: skip
    return {host: fork(_main, [*words, "--host", host], folder, host) for host in HOSTS}


def said(folder: Path) -> str:
    return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(folder.glob("out of *")))


def check(hosts: dict[str, Forked], folder: Path) -> None:
    codes = {host: ended(process) for host, process in hosts.items()}
    assert set(codes.values()) == {0}, f"{codes}\n{said(folder)}"


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["dp=2,fsdp=2", "fsdp=4,zero=2"])
def test_a_rank_that_is_killed_is_replaced_to_the_bit(folder: Path, calm: Calm, layout: str) -> None:
    expected, run = calm(layout), Run(folder / "rough")
    hosts = started(folder, "rough", layout, "--set", "pause=0.1")
    until_step(run, 8, hosts["a"])
    (rank,) = ranks_of(hosts["c"])
    os.kill(rank, signal.SIGKILL)
    check(hosts, folder)
    same(run, expected)
    assert "was ended by SIGKILL" in said(folder)


@pytest.mark.gpu
@pytest.mark.parametrize("blow", ["stopped", "asleep"])
def test_a_rank_that_hangs_is_named_and_replaced_to_the_bit(folder: Path, calm: Calm, blow: str) -> None:
    """The others wait for it in a collective, on their GPUs."""
    expected, run = calm("dp=2,fsdp=2"), Run(folder / "rough")
    hosts = started(folder, "rough", "dp=2,fsdp=2", "--set", "pause=0.1", task="slow.py:Asleep")
    until_step(run, 8, hosts["a"])
    if blow == "stopped":
        (rank,) = ranks_of(hosts["b"])
        os.kill(rank, signal.SIGSTOP)
    else:
        (folder / "sleep").touch()
    check(hosts, folder)
    same(run, expected)
    words = "has been stopped (SIGSTOP)" if blow == "stopped" else "has not moved for"
    assert words in (folder / "out of b").read_text(), said(folder)
    stuck = [event["reason"] for rank in range(len(HOSTS)) for event in run.events(rank, "failure") if event["stuck"]]
    assert len(stuck) == 1, said(folder)  # nobody else is blamed


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("fault", "kind", "rank", "place"),
    [
        ("asleep in the data", "stuck", 1, True),
        ("a collective of one rank", "desynchronised", 1, True),
        ("another shape", "desynchronised", None, False),
        ("two axes", "deadlock", None, False),
        ("slow rank", "slow", 1, False),
    ],
)
def test_why_is_told_over_nccl(tmp_path: Path, fault: str, kind: str, rank: int | None, place: bool) -> None:
    """Collectives are launched by the host and wait on the device: who is not there is known all the same."""
    task = faults.TASK.replace("time.sleep(0.2)", "time.sleep(1.5)")
    for size in ("5", "5 + engine.rank // 2", "70000"):
        task = task.replace(f"torch.ones({size})", f"torch.ones({size}, device=engine.device)")
    (tmp_path / "planted.py").write_text(task)
    settings = "--set", f"fault={fault}", "--set", "steps=20", "--restarts", "0", "--timeout", "30"
    hosts = started(tmp_path, "run", "dp=2,fsdp=2", *settings, task="planted.py:Planted")
    codes = [ended(process) for process in hosts.values()]
    found = why(Run(tmp_path / "run"))
    told = f"{found}\n{codes}\n{said(tmp_path)}"
    assert (found.kind, found.rank) == (kind, rank), told
    if place:
        assert found.place.endswith(faults.line(fault)), told
