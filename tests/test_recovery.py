"""Whatever is killed, at whatever moment: the run ends with the bits and samples of one that nothing happened to."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from phalanx import Run, cli
from phalanx.checkpoint.manager import CheckpointManager
from phalanx.checkpoint.store import open_store
from phalanx.launch import heartbeats, stopping
from phalanx.launch.forkserver import Forked
from phalanx.local_updates import LocalUpdates
from phalanx.words import many
from tests.conftest import children
from tests.forking import fork, printing_into
from tests.ports import free_port
from tests.test_cli import phalanx

TASK = """
import time
from dataclasses import dataclass
import torch
from torch import nn
import phalanx


@dataclass
class Slow(phalanx.Task):
    global_batch: int = 24
    steps: int = 60
    pause: float = 0.01

    def model(self):
        return nn.Sequential(nn.Linear(8, 13), nn.Dropout(0.1), nn.ReLU(), nn.Linear(13, 3))

    def data(self):
        made = torch.Generator().manual_seed(1)
        return phalanx.data.Arrays(x=torch.randn(331, 8, generator=made), y=torch.randint(0, 3, (331,), generator=made))

    def inputs(self, batch):
        time.sleep(self.pause)
        return batch["x"]

    def loss(self, output, batch):
        return phalanx.losses.cross_entropy(output, batch["y"])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "slow.py").write_text(TASK)
    return tmp_path


def _main(words: list[str], cwd: Path) -> None:
    os.chdir(cwd)
    heartbeats.LEAST_SECONDS = 1.0
    printing_into("out")
    sys.argv = ["phalanx", "train", *words]
    cli.main()


def _at_a_terminal(words: list[str], cwd: Path) -> None:
    stopping.at_a_terminal = lambda: True
    _main(words, cwd)


def started(cwd: Path, *words: str) -> Forked:
    """The command in a process of its own, its words in ``out``."""
    return fork(_main, list(words), cwd)


def meeting(folder: Path, *words: str, nodes: tuple[int, int]) -> Callable[[str], Forked]:
    """How a host of the run ``rough`` is started, by its name; all meet at one address. ``nodes``: least, most."""
    address = f"127.0.0.1:{free_port()}"
    least, most = map(str, nodes)

    def host(name: str) -> Forked:
        where = ("--run", "rough", "--min-nodes", least, "--max-nodes", most, "--meet", address, "--host", name)
        return started(folder, *words, *where)

    return host


def ended(process: Forked) -> int | None:
    process.join(timeout=90)
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
    process.close()
    return code


def ranks_of(process: Forked) -> list[int]:
    found = []
    for pid in children():
        try:
            if int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]) == process.pid:
                found.append(pid)
        except OSError:
            continue
    return sorted(found)


def until_step(run: Run, step: int, process: Forked) -> None:
    deadline = time.monotonic() + 60
    while not run.path.exists() or max(run.ledger(), default=0) < step:
        assert process.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def certificate(run: Run) -> dict[str, Any]:
    return json.loads(run.certificate_path.read_text())


def same(found: Run, expected: Run) -> None:
    assert certificate(found)["state"] == certificate(expected)["state"]
    assert certificate(found)["samples"] == certificate(expected)["samples"]
    one, other = found.ledger(), expected.ledger()
    assert [one[step]["samples"] for step in one] == [other[step]["samples"] for step in other]
    assert [one[step]["loss"] for step in one] == [other[step]["loss"] for step in other]


KEPT = ("--layout", "dp=2,fsdp=2", "--save-steps", "3", "--memory-steps", "2", "--restarts", "9")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """What nothing happens to."""
    folder = tmp_path_factory.mktemp("calm")
    (folder / "slow.py").write_text(TASK)
    assert ended(started(folder, "slow.py", *KEPT, "--run", "calm")) == 0
    return Run(folder / "calm")


def test_ranks_killed_at_random_moments(folder: Path, calm: Run) -> None:
    process = started(folder, "slow.py", *KEPT, "--run", "rough")
    chosen = random.Random(7)
    kills = 0
    while process.is_alive() and kills < 6:
        time.sleep(chosen.uniform(0, 0.8))
        ranks = ranks_of(process)
        if ranks:
            os.kill(chosen.choice(ranks), signal.SIGKILL)
            kills += 1
    assert ended(process) == 0, (folder / "out").read_text()
    same(Run(folder / "rough"), calm)


@pytest.mark.parametrize("blow", ["supervisor killed", "SIGTERM", "SIGHUP", "rank stopped"])
def test_every_other_blow(folder: Path, calm: Run, blow: str) -> None:
    run = Run(folder / "rough")
    process = started(folder, "slow.py", *KEPT, "--run", "rough")
    until_step(run, 25, process)
    ranks = ranks_of(process)
    assert process.pid is not None
    if blow == "rank stopped":
        os.kill(ranks[1], signal.SIGSTOP)
        assert ended(process) == 0
        assert "rank 1 has been stopped (SIGSTOP)" in (folder / "out").read_text()
    else:
        os.kill(process.pid, getattr(signal, blow, signal.SIGKILL))
        if blow == "SIGHUP":  # a terminal gives it to everybody in it
            for rank in ranks:
                os.kill(rank, signal.SIGHUP)
        assert ended(process) == (-9 if blow == "supervisor killed" else 130)
        if blow != "supervisor killed":  # it has saved where it stood
            assert max(run.ledger()) + 1 == max(int(p.name[5:]) for p in run.checkpoints_path.glob("step-*"))
        assert ended(started(folder, "--resume", "--run", "rough")) == 0
    same(run, calm)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_is_repeated_to_the_end_changes_nothing(folder: Path, number: signal.Signals) -> None:
    process = started(folder, "slow.py", *KEPT, "--run", "rough")
    until_step(Run(folder / "rough"), 10, process)
    assert process.pid is not None
    while process.is_alive():
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
        time.sleep(0.02)
    assert ended(process) == 130
    assert saved_step(Run(folder / "rough")) == max(Run(folder / "rough").ledger()) + 1


def saved_step(run: Run) -> int:
    return max(CheckpointManager(open_store(run.checkpoints_path)).steps(), default=0)


def test_signals_that_are_repeated_lose_nothing(folder: Path) -> None:
    """As schedulers do, and in any order; no file was due before the first of them."""
    run, chosen = Run(folder / "rough"), random.Random(3)
    words, steps = ["slow.py", "--on", "local:2", "--steps", "400"], 0
    for _ in range(4):
        process = started(folder, *words, "--run", "rough")
        until_step(run, steps + 12, process)
        for number in (
            signal.SIGTERM,
            *chosen.choices((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1), k=4),
        ):
            os.kill(process.pid or 0, number)
            time.sleep(chosen.uniform(0, 0.05))
        assert ended(process) == 130
        steps = max(run.ledger()) + 1
        told = (folder / "out").read_text()
        assert f"every rank has ended, saved up to step {steps}\n" in told
        assert " lost" not in told
        assert saved_step(run) == steps
        assert not run.certificate_path.exists()
        words = ["--resume"]


def test_a_rank_that_dies_while_it_is_asked_to_stop_loses_what_is_said(folder: Path) -> None:
    """Its last copy in memory is saved by ranks that are started for nothing else."""
    run = Run(folder / "rough")
    process = started(folder, "slow.py", "--on", "local:2", "--steps", "9999", "--run", "rough")
    until_step(run, 12, process)
    victim = ranks_of(process)[1]
    os.kill(victim, signal.SIGSTOP)  # so that it cannot save
    os.kill(process.pid or 0, signal.SIGTERM)
    time.sleep(0.3)
    os.kill(process.pid or 0, signal.SIGTERM)
    os.kill(victim, signal.SIGKILL)
    assert ended(process) == 130
    done, saved = max(event["step"] for event in run.events(0, "step")) + 1, saved_step(run)
    assert saved
    assert saved % 5 == 0
    lost = f", {many(done - saved, 'step')} after it lost" if done > saved else ""
    assert f"saved up to step {saved}{lost}\n" in (folder / "out").read_text()


def test_a_second_ctrl_c_at_a_terminal_says_what_is_lost(folder: Path) -> None:
    run = Run(folder / "rough")
    process = fork(_at_a_terminal, ["slow.py", "--on", "local:2", "--steps", "9999", "--run", "rough"], folder)
    until_step(run, 12, process)
    for rank in reversed(ranks_of(process)):
        os.kill(rank, signal.SIGSTOP)  # they cannot save
        time.sleep(0.3)  # the first rank notes its step, and waits for the second one in the next
    os.kill(process.pid or 0, signal.SIGINT)
    time.sleep(1)
    assert process.is_alive()
    os.kill(process.pid or 0, signal.SIGINT)
    assert ended(process) == 130
    told = (folder / "out").read_text()
    assert "Ctrl-C again ends it at once" in told
    assert (
        f"stopped by a second Ctrl-C: every rank has ended, nothing was saved, {max(run.ledger()) + 1} steps lost"
        in told
    )


def test_a_run_that_is_done_is_done_though_it_was_asked_to_stop(folder: Path) -> None:
    """While the last checkpoint and the weights are written nothing can be lost any more."""
    (folder / "slow.py").write_text(TASK.replace("    def inputs", LATE))
    run = Run(folder / "rough")
    process = started(folder, "slow.py", "--on", "local:2", "--steps", "9", "--run", "rough", "--unchecked")
    deadline = time.monotonic() + 60
    while not (folder / "evaluating").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        os.kill(process.pid or 0, number)
        for rank in ranks_of(process):
            os.kill(rank, number)
    assert ended(process) == 0, (folder / "out").read_text()
    assert certificate(run)["steps"] == 9


LATE = """    def held_out(self):
        return self.data()

    def evaluate(self, output, batch):
        import pathlib
        if list(pathlib.Path("rough/checkpoints").glob("step-*")):
            pathlib.Path("evaluating").touch()
            time.sleep(0.1)
        return {"loss": self.loss(output, batch)}

    def inputs"""


def test_hosts_come_and_go(folder: Path) -> None:
    """8 -> 6 -> 4 -> 8 ranks in one run, the first host and the rendezvous's among those that are lost."""
    settings = (
        "slow.py",
        "--layout",
        "dp=2,fsdp=4",
        "--set",
        "precision=float64",
        "--steps",
        "150",
        "--set",
        "pause=0.02",
    )
    assert ended(started(folder, *settings, "--set", "pause=0", "--run", "calm")) == 0
    run = Run(folder / "rough")

    host = meeting(folder, *settings, "--on", "local:2", "--memory-steps", "2", nodes=(2, 4))
    hosts = {name: host(name) for name in "abcd"}
    until_step(run, 15, hosts["a"])
    os.kill(hosts["a"].pid or 0, signal.SIGKILL)
    assert ended(hosts.pop("a")) == -9
    until_step(run, 35, next(iter(hosts.values())))
    os.kill(hosts["d"].pid or 0, signal.SIGKILL)
    assert ended(hosts.pop("d")) == -9
    until_step(run, 55, next(iter(hosts.values())))
    hosts |= {name: host(name) for name in "ef"}
    assert [ended(process) for process in hosts.values()] == [0, 0, 0, 0], (folder / "out").read_text()
    worlds = [event["world"] for event in run.events(0) if event["kind"] == "start"]
    assert [world for i, world in enumerate(worlds) if not i or world != worlds[i - 1]] in (
        [8, 6, 4, 8],
        [8, 6, 4, 6, 8],
    )
    one, other = run.ledger(), Run(folder / "calm").ledger()
    assert [one[step]["samples"] for step in range(150)] == [other[step]["samples"] for step in range(150)]
    assert max(abs(one[step]["loss"] - other[step]["loss"]) for step in range(150)) < 1e-9


@pytest.mark.parametrize("layout", ["dp=2,comm=int4", "dp=2,comm=onebit", "dp=2,comm=diloco:4:overlap=1"])
def test_a_rank_of_one_host_killed_where_each_host_has_what_is_its_own(folder: Path, layout: str) -> None:
    """What it owes of gradients, or has as a site: all go on to the bits of a run that was left alone."""
    settings = ("slow.py", "--layout", layout, "--steps", "40", "--set", "pause=0.05")
    assert ended(started(folder, *settings, "--run", "calm")) == 0
    run = Run(folder / "rough")
    host = meeting(folder, *settings, "--on", "local:1", "--memory-steps", "2", nodes=(2, 2))
    hosts = [host(name) for name in "ab"]
    until_step(run, 20, hosts[0])
    (rank,) = ranks_of(hosts[1])
    os.kill(rank, signal.SIGKILL)
    assert [ended(host) for host in hosts] == [0, 0], (folder / "out").read_text()
    assert [start.get("source") for start in run.events(0, "start")] == [None, "memory"]
    same(run, Run(folder / "calm"))


@pytest.mark.parametrize("comm", ["exact", "int4", "diloco:4:overlap=1"])
def test_a_host_that_is_replaced_at_once(folder: Path, comm: str) -> None:
    """Replicas and sites send each other no copies: what is left has all that is needed, and nothing is in files."""
    settings = ("slow.py", "--layout", f"dp=2,comm={comm}", "--steps", "60", "--set", "pause=0.05")
    run = Run(folder / "rough")

    host = meeting(folder, *settings, "--on", "local:1", "--memory-steps", "2", nodes=(2, 2))
    hosts = {name: host(name) for name in "ab"}
    until_step(run, 20, hosts["a"])
    os.kill(hosts["b"].pid or 0, signal.SIGKILL)
    assert ended(hosts.pop("b")) == -9
    hosts |= {name: host(name) for name in "cd"}  # for one of them there is no place
    assert [ended(process) for process in hosts.values()] == [0, 0, 0], (folder / "out").read_text()
    assert (folder / "out").read_text().count("the others have come to the end of the run meanwhile") == 1
    starts = [event for event in run.events(0) if event["kind"] == "start"]
    assert [start["world"] for start in starts] == [2, 2]
    assert starts[1]["step"] >= 16
    assert starts[1]["source"].endswith(f"step-{starts[1]['step']:08d}"), "what others have in memory, in a file"
    assert certificate(run)["steps"] == 60
    done = [event["step"] for event in run.events(0, "step")]
    assert certificate(run)["repeated"] == len(done) - len(set(done))  # none, if it was killed just after a kept step
    left_out = [
        [change for change in start["changes"] if "owed of gradients is left out" in change] for start in starts
    ]
    assert [len(each) for each in left_out] == [0, comm == "int4"]


@pytest.mark.every
@pytest.mark.parametrize("comm", ["diloco:4", "diloco:8:int8:fragments=2:overlap=2"])
def test_sites_come_and_go(folder: Path, comm: str) -> None:
    """3 -> 2 -> 3 sites, each a host: those that are left go on from where all had agreed, and take one in again."""
    settings = ("slow.py", "--layout", f"dp=3,comm={comm}", "--steps", "240", "--set", "pause=0.05")
    run = Run(folder / "rough")

    host = meeting(folder, *settings, "--on", "local:1", "--memory-steps", "1", nodes=(1, 3))
    hosts = {name: host(name) for name in "abc"}
    until_step(run, 18, hosts["a"])
    os.kill(hosts["b"].pid or 0, signal.SIGKILL)
    assert ended(hosts.pop("b")) == -9
    until_step(run, 40, hosts["a"])
    hosts["d"] = host("d")
    assert [ended(process) for process in hosts.values()] == [0, 0, 0], (folder / "out").read_text()
    starts = [event for event in run.events(0) if event["kind"] == "start"]
    assert [start["world"] for start in starts] == [3, 2, 3]
    assert all(start["step"] % LocalUpdates.parse(comm).every == 0 for start in starts)
    assert starts[1]["source"] == "memory"
    assert starts[1]["step"] >= 16
    assert certificate(run)["steps"] == 240
    one = run.ledger()
    assert sorted(one) == list(range(240))


def test_a_second_run_on_one_folder_is_refused_and_harms_nothing(folder: Path) -> None:
    process = started(folder, "slow.py", *KEPT, "--run", "one")
    run = Run(folder / "one")
    until_step(run, 5, process)
    second = phalanx("train", "--resume", "--run", "one", cwd=folder)
    assert second.returncode == 2
    assert f"is being trained by process {process.pid}" in second.stderr
    assert ended(process) == 0
    assert certificate(run)["generations"] == 1


def test_a_drill_and_a_run_that_is_finished(folder: Path) -> None:
    done = phalanx("train", "slow.py", "--on", "local:2", "--kill", "1@7", "--steps", "9", "--run", "one", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "rank 1 was ended by SIGKILL, the drill of --kill 1@7" in done.stderr
    assert "memory" not in done.stderr
    assert "2 done again after failures, with the same loss to the last bit" in done.stdout
    again = phalanx("train", "--resume", "--run", "one", cwd=folder)
    assert again.returncode == 0
    assert "is finished" in again.stdout
    longer = phalanx("train", "--resume", "--run", "one", "--steps", "12", "--on", "local:1", cwd=folder)
    assert longer.returncode == 0, longer.stderr
    assert certificate(Run(folder / "one"))["steps"] == 12
    wrong = phalanx("train", "slow.py", "--kill", "3@7", cwd=folder)
    assert wrong.returncode == 2
    assert "would kill nobody" in wrong.stderr


def test_a_refused_run_leaves_a_folder_of_yours_alone(folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "thesis.txt").write_text("precious")
    done = phalanx("train", "slow.py", "--set", "global_batch=999", "--run", "mine", cwd=folder)
    assert done.returncode == 2
    assert (folder / "mine" / "thesis.txt").read_text() == "precious"
    done = phalanx("train", "slow.py", "--set", "global_batch=999", "--run", "new", cwd=folder)
    assert done.returncode == 2
    assert not (folder / "new").exists()


def test_a_longer_run_is_not_finished_by_the_shorter_ones_certificate(folder: Path) -> None:
    run = Run(folder / "one")
    assert phalanx("train", "slow.py", "--steps", "6", "--run", "one", cwd=folder).returncode == 0
    short = run.weights_path.read_bytes()
    process = started(folder, "--resume", "--run", "one", "--steps", "30", "--set", "pause=0.05")
    until_step(run, 12, process)
    os.kill(process.pid or 0, signal.SIGKILL)
    assert ended(process) == -9
    assert not run.certificate_path.exists()
    assert ended(started(folder, "--resume", "--run", "one", "--steps", "30")) == 0
    assert certificate(run)["steps"] == 30
    assert run.weights_path.read_bytes() != short
    less = phalanx("train", "--resume", "--run", "one", "--steps", "20", cwd=folder)
    assert less.returncode == 2
    assert "is finished at step 30" in less.stderr


ODD = (
    TASK.replace(
        "class Slow",
        '''class Odd(torch.optim.AdamW):
    elementwise = True
    calls = 0

    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            group["betas"] = (0.9 - 0.001 * self.calls, 0.999)
        return super().step(closure)


class Teacher(nn.Module):
    """Weights that nobody trains and every forward moves."""

    def __init__(self):
        super().__init__()
        self.linear, self.average = nn.Linear(8, 3), nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x):
        found = self.linear(x)
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.9).add_(self.linear.bias, alpha=0.1)
        return found + self.average


@dataclass
class Slow''',
    )
    .replace("@dataclass\nclass Odd", "class Odd")
    .replace(
        "return nn.Sequential(nn.Linear(8, 13), nn.Dropout(0.1), nn.ReLU(), nn.Linear(13, 3))",
        "return Teacher()\n\n    def optimizer(self, params):\n        return Odd(params, lr=0.01)",
    )
)


def test_what_odd_optimizers_and_models_change_survives(folder: Path) -> None:
    (folder / "odd.py").write_text(ODD)
    words = ("train", "odd.py", "--on", "local:2", "--steps", "14", "--memory-steps", "4", "--set", "pause=0")
    calm = phalanx(*words, "--run", "calm", cwd=folder)
    assert calm.returncode == 0, calm.stderr
    rough = phalanx(*words, "--run", "rough", "--kill", "1@10", cwd=folder)
    assert rough.returncode == 0, rough.stderr
    same(Run(folder / "rough"), Run(folder / "calm"))


# What was lost, is not there, or cannot be read.


def test_a_lost_run_folder_goes_on_from_checkpoints_elsewhere(folder: Path) -> None:
    """They know the number of the last generation, which the new folder does not."""
    words = ["slow.py", "--set", "pause=0", "--checkpoints", "kept", "--resume"]
    assert phalanx("train", *words, "--run", "one", "--steps", "4", cwd=folder).returncode == 0
    (folder / "kept" / ".writing-00009").mkdir()  # of a generation that was killed
    done = phalanx("train", *words, "--run", "two", "--steps", "6", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "of the first 4 steps the checkpoint alone is known" in done.stdout
    assert "Fenced" not in done.stdout + done.stderr
    assert CheckpointManager(open_store(folder / "kept")).steps()[-1] == 6
    assert (folder / "two" / "generation").read_text() == "10\n"


def test_checkpoints_that_are_not_mounted_are_missed(folder: Path) -> None:
    words = ["slow.py", "--set", "pause=0", "--run", "one", "--checkpoints", "kept", "--resume"]
    assert phalanx("train", *words, "--steps", "4", cwd=folder).returncode == 0
    (folder / "kept").rename(folder / "elsewhere")
    events = (folder / "one" / "events" / "rank-00000.jsonl").read_bytes()
    for make in (lambda: None, (folder / "kept").mkdir):
        make()
        done = phalanx("train", *words, "--steps", "6", cwd=folder)
        assert done.returncode == 3
        assert "has saved checkpoints, up to step 4, and there is nothing in" in done.stderr
    assert (folder / "one" / "events" / "rank-00000.jsonl").read_bytes() == events
    words[words.index("kept")] = "elsewhere"
    assert phalanx("train", *words, "--steps", "6", cwd=folder).returncode == 0


@pytest.mark.parametrize("left", [0, 1], ids=["empty", "cut"])
def test_settings_that_were_lost_are_not_taken_to_be_the_usual(folder: Path, left: int) -> None:
    words = ["slow.py", "--set", "pause=0", "--run", "one"]
    assert phalanx("train", *words, "--steps", "2", cwd=folder).returncode == 0
    path = folder / "one" / "run.toml"
    lines = path.read_text().splitlines(keepends=True)
    cut = next(n for n, line in enumerate(lines) if line.startswith("pause"))
    path.write_text("".join(lines[: cut * left]))
    done = phalanx("train", "slow.py", "--resume", "--run", "one", "--steps", "3", cwd=folder)
    assert (done.returncode, "cut short" in done.stderr) == ((2, True), (0, False))[left]
    assert ("does not say what pause is: it is 0.01 now" in done.stdout) == bool(left)


def test_what_cannot_be_read_costs_no_other_checkpoint(folder: Path) -> None:
    words = ["slow.py", "--set", "pause=0", "--run", "one", "--steps", "6"]
    assert phalanx("train", *words, "--save-steps", "3", cwd=folder).returncode == 0
    shutil.rmtree(folder / "one" / "final")
    part = folder / "one" / "checkpoints" / "step-00000006" / "part-00000.safetensors"
    part.unlink()
    part.mkdir()
    found = phalanx("verify", "one", cwd=folder)
    assert found.returncode == 1
    assert "part-00000.safetensors cannot be read: it is no regular file" in found.stdout
    done = phalanx("train", *words, "--resume", "--save-steps", "1", "--keep", "1", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "cannot be read: it is no regular file; going back to the checkpoint before it" in done.stdout
    assert phalanx("verify", "one", cwd=folder).returncode == 0
    manager = CheckpointManager(open_store(folder / "one" / "checkpoints"))
    assert manager.steps() == [5, 6]
    assert manager.damaged() == ["damaged-step-00000006"]
