"""Why a run is stuck, dead, wrong or slow: each planted fault is named with its rank, its axis and its line."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from phalanx.run import Run
from phalanx.watch import stuck
from phalanx.watch.why import why
from tests.conftest import children
from tests.test_cli import phalanx
from tests.watch.faults import diagnosed, ended, line, started
from tests.watch.test_bad_numbers import run_with

HERE = os.uname().nodename


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,fsdp=2"])
def test_nothing_is_wrong_with_a_healthy_run(tmp_path: Path, layout: str) -> None:
    found = diagnosed(tmp_path, "", "--layout", layout, code=0)
    assert (found.exit_code, found.kind, found.rank) == (0, "nothing", None), found
    assert found.summary == "nothing wrong: done, after 14 steps"
    assert found.evidence[0].startswith("a step takes ")
    assert not (tmp_path / "run" / "stacks").exists()


def test_a_rank_that_waits_in_a_collective_of_its_own(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, "a collective of torch's on one rank", "--on", "local:2")
    assert (found.kind, found.rank, found.host, found.axis) == ("stuck", 1, HERE, "dp"), found
    assert found.place.endswith(line("a collective of torch's on one rank"))
    assert "it has been in torch.distributed.all_reduce for" in found.summary
    assert any(
        re.match(rf"rank 0 on {HERE} waits for \d+ s in .* on dp, .* in step 9, .*called at", each)
        for each in found.evidence
    )
    assert "phalanx why run" in (tmp_path / "out").read_text()


def test_a_rank_asleep_in_the_data(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, "asleep in the data", "--layout", "fsdp=2", "--timeout", "4")
    assert (found.kind, found.rank, found.host, found.axis) == ("stuck", 1, HERE, "fsdp"), found
    assert found.place.endswith(line("asleep in the data"))
    assert "in __getitem__" in found.summary
    assert "it has been in data for" in found.summary


def test_a_worker_asleep_in_the_data(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, "asleep in the data", "--on", "local:2", "--set", "workers=1", "--timeout", "4")
    assert (found.kind, found.rank, found.host, found.axis) == ("stuck", 1, HERE, "dp"), found
    assert found.place.endswith(line("asleep in the data"))
    assert "it has been in data for" in found.summary


def test_a_rank_that_computes_for_ever(tmp_path: Path) -> None:
    """It is not stuck, and given its time; the other one may be the first whose time is up."""
    found = diagnosed(tmp_path, "computes for ever", "--on", "local:2", "--timeout", "4")
    assert (found.kind, found.rank, found.host, found.axis) == ("stuck", 1, HERE, "dp"), found
    assert found.place.rpartition(":")[0].endswith("planted.py")
    assert "it has been in forward for" in found.summary


def test_a_rank_that_was_stopped(tmp_path: Path) -> None:
    process = started(tmp_path, "slow rank", "--on", "local:2", "--steps", "200")
    run = Run(tmp_path / "run")
    until(lambda: run.path.exists() and len(run.ledger()) > 5)
    os.kill(ranks_of(process.pid or 0)[1], signal.SIGSTOP)
    assert ended(process) == 1
    found = why(run)
    assert (found.kind, found.rank, found.host) == ("stuck", 1, HERE), found
    assert "it is stopped (SIGSTOP), state T" in found.summary
    assert "kill -CONT" in found.next


def ranks_of(pid: int) -> list[int]:
    def parent(child: int) -> int:
        return int(Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[1])

    return sorted(child for child in children() if parent(child) == pid)


def until(true: object, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_collective_that_one_rank_launches_alone(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, "a collective of one rank", "--on", "local:3")
    assert (found.kind, found.rank, found.axis) == ("desynchronised", 1, "dp"), found
    assert found.place.endswith(line("a collective of one rank"))
    assert "all-reduce float32 [5]" in found.summary
    assert any(re.match(rf"rank 0 on {HERE}: all-reduce .*, in backward, called at ", each) for each in found.evidence)


def test_a_shape_that_differs(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, "another shape", "--on", "local:3")
    assert (found.kind, found.rank, found.axis) == ("desynchronised", 2, "dp"), found
    assert found.place.endswith(line("another shape"))
    assert "all-reduce float32 [6] of rank 2 at planted.py:" in found.summary
    assert "all-reduce float32 [5] of ranks 0, 1 at planted.py:" in found.summary


def test_two_axes_in_a_ring(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, "two axes", "--layout", "dp=2,fsdp=2")
    assert found.kind == "deadlock", found
    for words in ("rank 0 waits in all-reduce", "on dp for rank 2", "on fsdp for rank 3"):
        assert words in found.summary
    assert "planted.py:" in found.next


def test_an_exception_on_one_rank(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, "exception", "--on", "local:2")
    assert (found.kind, found.rank, found.host, found.step) == ("died", 1, HERE, 9), found
    assert found.place.endswith(line("exception"))
    assert "failed first, after 8 steps: KeyError: 'what is missing'" in found.summary
    assert any(each.startswith(f"rank 0 on {HERE} as a consequence: lost its connection") for each in found.evidence)


def test_a_killed_rank(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, "killed", "--on", "local:2")
    assert (found.kind, found.rank, found.host, found.step) == ("died", 1, HERE, 9), found
    assert "was ended by SIGKILL" in found.summary
    assert "it was in forward, in step 9" in found.evidence
    told = json.loads(phalanx("why", "run", "--json", cwd=tmp_path).stdout)
    assert (told["kind"], told["rank"], told["code"], told["place"]) == ("died", 1, 1, None)


def test_a_rank_that_touches_what_is_not_its_own(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, "a fault of memory", "--on", "local:2")
    assert (found.kind, found.rank, found.step) == ("died", 1, 9), found
    assert "was ended by SIGSEGV" in found.summary
    assert found.place.endswith(line("a fault of memory"))


def test_a_killed_supervisor(tmp_path: Path) -> None:
    process = started(tmp_path, "slow rank", "--on", "local:2", "--steps", "200")
    run = Run(tmp_path / "run")
    until(lambda: run.path.exists() and len(run.ledger()) > 5)
    os.kill(process.pid or 0, signal.SIGKILL)
    ended(process)
    until(lambda: why(run).kind == "died", 10)
    assert "ended without a word, after" in why(run).summary


def test_a_rank_that_is_slow(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, "slow rank", "--layout", "fsdp=3", code=0)
    assert (found.kind, found.rank, found.host) == ("slow", 1, HERE), found
    assert found.summary.endswith("in forward")
    assert any(re.match(r"it was the last to come to \d+% of their collectives", each) for each in found.evidence)


def test_data_that_is_slow(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, "slow data", "--on", "local:2", code=0)
    assert found.kind == "slow", found
    assert found.summary.startswith("slow: steps wait for data")
    assert "workers" in found.next


def test_a_loss_that_is_not_a_number(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, "not a number", "--on", "local:2", code=0)
    assert (found.kind, found.step) == ("wrong", 6), found
    assert "the loss is nan" in found.summary
    assert found.evidence[0].startswith("its samples were ")


def test_a_rank_that_went_past_what_the_others_called(tmp_path: Path) -> None:
    """The condition is at the line where the others are."""
    found = diagnosed(tmp_path, "a collective of torch's but on one rank", "--on", "local:4")
    assert (found.kind, found.rank, found.axis) == ("stuck", 1, "torch.distributed"), found
    assert found.place.endswith(line("a collective of torch's but on one rank"))
    assert (tmp_path / "out").read_text().count(found.summary) == 1


def test_a_rank_that_leaves(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, "left", "--on", "local:3")
    assert (found.kind, found.rank) == ("died", 1), found
    assert "left by sys.exit(0) before the end" in found.summary
    assert found.place.endswith(line("left"))


def test_a_module_that_makes_it_not_a_number(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, "a module's nan", "--layout", "fsdp=2,zero=3")
    assert (found.kind, found.rank, found.place) == ("wrong", 1, "1"), found
    assert "1 gives numbers that are not finite, from some that are, on rank 1" in found.summary


def test_replicas_that_drift_apart(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, "drift", "--on", "local:3", "--steps", "40")
    assert (found.kind, found.rank, found.step) == ("wrong", 1, 16), found
    assert "2.weight of rank 1 differs" in found.summary


def test_weights_that_learn_nothing(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, "nothing to learn", "--on", "local:2", code=0)
    assert found.kind == "wrong", found
    assert "0.weight, 0.bias, 2.weight have had no gradient but zeros in the 8 steps" in found.summary


def test_a_run_that_hangs_now_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor has not noticed yet."""
    monkeypatch.setattr(stuck, "STILL_SECONDS", 0.5)
    monkeypatch.setattr(stuck, "TIMES_MEDIAN", 1)
    process = started(tmp_path, "asleep in the data", "--on", "local:2", least=60)
    run = Run(tmp_path / "run")
    until(lambda: run.path.exists() and len(run.ledger()) > 7)
    time.sleep(1)
    asked = phalanx("why", "run", "--stacks", cwd=tmp_path)
    assert f"rank 1, process {ranks_of(process.pid or 0)[1]} on {HERE}: " in asked.stdout, asked
    assert "in __getitem__" in asked.stdout
    found = why(run)
    assert (found.kind, found.rank) == ("stuck", 1), found
    assert found.place.endswith(line("asleep in the data"))
    os.kill(process.pid or 0, signal.SIGKILL)
    ended(process)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    done = phalanx("why", "nowhere", cwd=tmp_path)
    assert done.returncode == 2
    assert "is no run's folder" in done.stderr


def test_a_hang_that_was_survived_is_told_of(tmp_path: Path) -> None:
    """With the rank that was at fault, and where."""
    process = started(tmp_path, "slow rank", "--on", "local:2", "--restarts", "2", "--steps", "20")
    run = Run(tmp_path / "run")
    until(lambda: run.path.exists() and len(run.ledger()) > 8)
    os.kill(ranks_of(process.pid or 0)[1], signal.SIGSTOP)
    assert ended(process) == 0
    found = why(run)
    assert found.rank == 1
    assert any(
        re.match(r"before, in generation 1, after which ranks were started again: stuck: rank 1 on .* state T", each)
        for each in found.evidence
    ), found


@pytest.mark.parametrize(("last", "told"), [("stopped", True), ("end", False)])
def test_a_verdict_on_a_run_that_was_asked_to_stop_says_so(tmp_path: Path, last: str, told: bool) -> None:
    losses = [2.0 + 0.01 * (step % 5) for step in range(60)]
    losses[59] = 30.0
    found = why(run_with(tmp_path, (last, {"step": 60}), losses=losses))
    assert found.kind == "wrong"
    assert any(line.startswith("it was asked to stop, by a person (Ctrl-C)") for line in found.evidence) == told


@pytest.mark.parametrize(("since", "told"), [(900, True), (1100, False)])
def test_a_bad_number_of_long_ago_is_not_the_verdict(tmp_path: Path, since: int, told: bool) -> None:
    losses = [2.0 + 0.01 * (step % 5) for step in range(60 + since)]
    losses[59] = 30.0
    found = why(run_with(tmp_path, losses=losses))
    assert (found.kind == "wrong") == told
    assert told or any(line.startswith("besides: wrong: the loss of step 60") for line in found.evidence)
