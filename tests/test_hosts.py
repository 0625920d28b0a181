"""Hosts with networks of their own: they find each other with nothing set by hand, and lose nothing when cut apart."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from safetensors.torch import load_file

from phalanx import Run, cli
from tests.hosts import Hosts, needs_namespaces
from tests.test_recovery import TASK, certificate, ended, started, until_step

SETTINGS = ("slow.py", "--layout", "dp=2", "--set", "precision=float64")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "slow.py").write_text(TASK)
    return tmp_path


def _main(words: list[str], cwd: Path, out: str) -> None:
    os.chdir(cwd)
    handle = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.argv = ["phalanx", "train", *words]
    cli.main()


class Trained:
    """One run on several hosts, with the same command on each."""

    def __init__(self, hosts: Hosts, folder: Path, words: tuple[str, ...]) -> None:
        self.hosts, self.folder, self.words = hosts, folder, words
        self.run = Run(folder / "spread")
        self.processes: dict[str, BaseProcess] = {}

    def start(self, *names: str, more: tuple[str, ...] = ()) -> None:
        for name in names:
            words = [*self.words, *more]
            self.processes[name] = self.hosts[name].start(_main, words, self.folder, f"out of {name}")

    def until(self, step: int) -> None:
        until_step(self.run, step, next(iter(self.processes.values())))

    def lose(self, name: str) -> None:
        """The host is gone, its supervisor and its ranks."""
        self.processes[name].kill()
        assert ended(self.processes.pop(name)) == -9

    def ended(self) -> dict[str, int | None]:
        return {name: ended(self.processes.pop(name)) for name in list(self.processes)}

    def said(self, name: str) -> str:
        return (self.folder / f"out of {name}").read_text()


@contextmanager
def spread(folder: Path, number: int, *words: str, ipv6: bool = False, meet: str = "node1:29400") -> Iterator[Trained]:
    with Hosts(number, folder, ipv6) as hosts:
        trained = Trained(
            hosts, folder, (*words, "--on", "local:1", "--run", "spread", "--max-nodes", str(number), "--meet", meet)
        )
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
@pytest.mark.parametrize("ipv6", [False, True])
def test_hosts_whose_names_mean_loopback_to_themselves_train_together(folder: Path, ipv6: bool) -> None:
    words = (*SETTINGS, "--steps", "6")
    with spread(folder, 2, *words, ipv6=ipv6) as trained:
        trained.start("node1", "node2")
        assert trained.ended() == {"node1": 0, "node2": 0}, trained.said("node1") + trained.said("node2")
        assert [event["world"] for event in trained.run.events(0, "start")] == [2]
    same(trained.run, alone(folder, *words))
