"""Hosts with networks of their own: they find each other with nothing set by hand, and lose nothing when cut apart."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from phalanx import Run, cli
from phalanx.launch import network, shared
from phalanx.launch.forkserver import Forked
from tests.hosts import Hosts, descendants, needs_namespaces
from tests.test_cli import phalanx
from tests.test_recovery import TASK, certificate, started, until_step

MEETS_AT = "10.77.0.1"
SETTINGS = ("slow.py", "--layout", "dp=2", "--set", "precision=float64")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "slow.py").write_text(TASK)
    return tmp_path


def _main(words: list[str], cwd: Path, out: str) -> None:
    os.chdir(cwd)
    shared.PATIENCE_SECONDS = 1.0
    handle = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.argv = ["phalanx", "train", *words]
    cli.main()


def ended(process: Forked) -> int | None:
    """Its exit code. Hosts of these tests wait more than they compute, but on a busy machine they do for minutes."""
    process.join(timeout=400)
    code = process.exitcode
    process.kill()
    process.close()
    return code


class Trained:
    """One run on several hosts, with the same command on each."""

    def __init__(self, hosts: Hosts, folder: Path, words: tuple[str, ...]) -> None:
        self.hosts, self.folder, self.words = hosts, folder, words
        self.run = Run(folder / "spread")
        self.processes: dict[str, Forked] = {}

    def start(self, *names: str, more: tuple[str, ...] = ()) -> None:
        for name in names:
            words = [*self.words, *more]
            self.processes[name] = self.hosts[name].start(_main, words, self.folder, f"out of {name}")

    def start_in_turn(self, *names: str) -> None:
        """The first to come is the first host, if it is the rendezvous's too."""
        for name in names:
            self.start(name)
            while (found := self.hosts[name].ask(_connected)) is not True:
                assert self.processes[name].is_alive(), found
                time.sleep(0.2)
            time.sleep(0.5)

    def until(self, step: int) -> None:
        until_step(self.run, step, next(iter(self.processes.values())))

    def worlds(self) -> list[int]:
        """How many ranks there were, generation by generation."""
        return [event["world"] for event in self.run.events(0, "start")]

    def lose(self, name: str) -> None:
        """The host is gone, its supervisor and its ranks."""
        self.processes[name].kill()
        assert ended(self.processes.pop(name)) == -9

    def ended(self, but: str = "") -> dict[str, int | None]:
        """The exit codes of all hosts but one, which is then gone."""
        codes = {name: ended(self.processes.pop(name)) for name in list(self.processes) if name != but}
        if but:
            self.lose(but)
        return codes

    def said(self, name: str) -> str:
        out = self.folder / f"out of {name}"
        return out.read_text() if out.exists() else ""


def _connected() -> bool:
    socket.create_connection((MEETS_AT, 29400), timeout=5).close()
    return True


@contextmanager
def spread(folder: Path, number: int, *words: str, ipv6: bool = False) -> Iterator[Trained]:
    """Hosts that meet at the first of them, each with a rank."""
    more = ("--on", "local:1", "--run", "spread", "--max-nodes", str(number), "--meet", "node1:29400")
    with Hosts(number, folder, ipv6) as hosts:
        trained = Trained(hosts, folder, (*words, *more))
        try:
            yield trained
        finally:
            for process in trained.processes.values():
                process.kill()
                process.join()


def alone(folder: Path, *words: str) -> Run:
    """The run left alone, on one host."""
    assert ended(started(folder, *words, "--set", "pause=0", "--run", "calm")) == 0, (folder / "out").read_text()
    return Run(folder / "calm")


def same(found: Run, expected: Run) -> None:
    """Every sample as planned, and the same weights."""
    assert certificate(found)["samples"] == certificate(expected)["samples"]
    one, other = found.ledger(), expected.ledger()
    assert [one[step]["samples"] for step in sorted(one)] == [other[step]["samples"] for step in sorted(other)]
    ours, theirs = load_file(found.weights_path), load_file(expected.weights_path)
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-9


@needs_namespaces
@pytest.mark.parametrize("ipv6", [False, pytest.param(True, marks=pytest.mark.every)])
def test_hosts_whose_names_mean_loopback_to_themselves_train_together(folder: Path, ipv6: bool) -> None:
    words = (*SETTINGS, "--steps", "6")
    with spread(folder, 2, *words, ipv6=ipv6) as trained:
        trained.start("node1", "node2")
        assert trained.ended() == {"node1": 0, "node2": 0}, trained.said("node1") + trained.said("node2")
        assert [event["world"] for event in trained.run.events(0, "start")] == [2]
    same(trained.run, alone(folder, *words))


def test_a_meeting_at_the_loopback_of_ipv6(folder: Path) -> None:
    with network.listen("::1") as free:
        address = f"[::1]:{free.getsockname()[1]}"
    words = (*SETTINGS, "--steps", "4", "--on", "local:1", "--run", "spread", "--max-nodes", "2", "--meet", address)
    hosts = [started(folder, *words, "--host", name) for name in "ab"]
    assert [ended(host) for host in hosts] == [0, 0], (folder / "out").read_text()
    assert [event["world"] for event in Run(folder / "spread").events(0, "start")] == [2]


def test_an_interface_that_is_not_there_or_not_needed(folder: Path) -> None:
    several = ("--max-nodes", "2", "--meet", "node1:29400")
    done = phalanx("train", "slow.py", "--run", "one", *several, "--interface", "eth77", cwd=folder)
    assert done.returncode == 2
    assert "--interface eth77: this host has no such interface with an address. Name one of lo (127.0.0" in done.stderr
    done = phalanx("train", "slow.py", "--interface", "lo", cwd=folder)
    assert done.returncode == 2
    assert "--interface lo has no effect on one host" in done.stderr


@needs_namespaces
def test_hosts_that_do_not_share_the_folder_are_told_before_the_first_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_KEY", "known to both hosts")
    with spread(folder, 2, *SETTINGS, "--steps", "6") as trained:
        trained.hosts["node2"].hide(folder / "spread")
        trained.start("node1", "node2")
        assert trained.ended() == {"node1": 3, "node2": 3}
        for name in trained.hosts.names:
            assert re.search("host node. does not see what host node. writes to spread/checkpoints", trained.said(name))
            assert "Give --run a folder that all hosts share, or --checkpoints" in trained.said(name)
            assert "Traceback" not in trained.said(name)
        assert not trained.run.ledger()


@needs_namespaces
@pytest.mark.every
def test_checkpoints_that_all_hosts_see_are_enough(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_KEY", "known to both hosts")
    words = (*SETTINGS, "--steps", "6")
    with spread(folder, 2, *words, "--checkpoints", "kept") as trained:
        trained.hosts["node2"].hide(folder / "spread")
        trained.start_in_turn("node1", "node2")
        assert trained.ended() == {"node1": 0, "node2": 0}, trained.said("node1") + trained.said("node2")
        assert "spread is not shared" in trained.said("node2")
        assert not [path.name for path in (folder / "kept").iterdir() if path.name.startswith(".met")]
    same(trained.run, alone(folder, *words))


LONG = ("slow.py", "--set", "precision=float64", "--memory-steps", "2", "--steps", "100")


@needs_namespaces
@pytest.mark.every
@pytest.mark.parametrize(("number", "name"), [(2, "node2"), (3, "node3"), (2, "node1"), (3, "node1")])
def test_a_link_cut_for_15_s(folder: Path, number: int, name: str) -> None:
    """The host comes back and is taken in again; where it is the rendezvous's, the others wait for it."""
    words = (*LONG, "--layout", f"dp={number}")
    with spread(folder, number, *words, "--set", "pause=0.3") as trained:
        trained.start(*trained.hosts.names)
        trained.until(20)
        trained.hosts.cut(name)
        time.sleep(15)
        trained.hosts.mend(name)
        assert set(trained.ended().values()) == {0}, "\n".join(map(trained.said, trained.hosts.names))
        worlds = trained.worlds()
        assert (worlds[0], worlds[-1]) == (number, number), worlds
        assert len(worlds) > 2, worlds
    same(trained.run, alone(folder, *words))


@needs_namespaces
@pytest.mark.every
@pytest.mark.parametrize("number", [2, 3])
def test_a_link_cut_for_good(folder: Path, number: int) -> None:
    words = (*LONG, "--layout", f"dp={number}")
    with spread(folder, number, *words, "--set", "pause=0.05") as trained:
        trained.start(*trained.hosts.names)
        trained.until(20)
        lost = trained.hosts.names[-1]
        trained.hosts.cut(lost)
        assert set(trained.ended(but=lost).values()) == {0}, trained.said("node1")
        assert trained.worlds()[-1] == number - 1
    same(trained.run, alone(folder, *words))


@needs_namespaces
@pytest.mark.every
@pytest.mark.parametrize("blow", ["lost", "cut off"])
def test_the_first_host_is_lost(folder: Path, blow: str) -> None:
    """The rendezvous is at another host, which stays; it comes last, since it cannot reach itself at first."""
    words = (*LONG, "--layout", "dp=3")
    with spread(folder, 3, *words, "--set", "pause=0.05") as trained:
        trained.hosts["node1"].ip("link set lo down")
        trained.start("node1", "node2", "node3")
        while not all("meets others" in trained.said(name) for name in trained.hosts.names):
            time.sleep(0.1)
        time.sleep(3)
        trained.hosts["node1"].ip("link set lo up")
        trained.until(20)
        first = next(name for name in trained.hosts.names if "host  1 of 3" in trained.said(name))
        assert first != "node1"
        if blow == "cut off":
            trained.hosts.cut(first)
            codes = trained.ended(but=first)
        else:
            trained.lose(first)
            codes = trained.ended()
        assert set(codes.values()) == {0}, "\n".join(map(trained.said, trained.hosts.names))
        assert trained.worlds()[-1] == 2
    same(trained.run, alone(folder, *words))


@needs_namespaces
def test_a_host_that_stood_still_until_the_others_had_ended(folder: Path) -> None:
    """It was lost, they went on without it, and when it looks for them again there is nothing left to do."""
    words = ("slow.py", "--set", "precision=float64", "--steps", "40", "--layout", "dp=2", "--set", "pause=0.05")
    with spread(folder, 2, *words) as trained:
        trained.start_in_turn("node1", "node2")
        trained.until(10)
        pids = descendants(trained.processes["node2"].pid or 0)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        assert ended(trained.processes.pop("node1")) == 0
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        assert trained.ended() == {"node2": 0}
        assert "the others have come to the end of the run meanwhile" in trained.said("node2")
        assert "done: the first host says what came of it" in trained.said("node2")
        assert trained.worlds() == [2, 1]
    same(trained.run, alone(folder, *words))
