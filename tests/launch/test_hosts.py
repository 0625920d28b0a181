"""On real hosts over a real ssh: the same bits as here; cut off, lost, stopped, killed: nothing lost, nothing left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phalanx import Run, WrongUse
from phalanx.launch.hosts import Hosts
from phalanx.launch.place import Command, place_of
from tests.ssh import SshHosts, needs_ssh, ssh_hosts
from tests.test_recovery import TASK

WORDS = ("slow.py", "--set", "precision=float64", "--layout", "dp=2", "--save-steps", "10", "--grace", "10")
EXACT = (*WORDS, "--exact", "--set", "pause=0.2")


def parsed(on: str) -> Hosts:
    made = place_of(on)
    assert isinstance(made, Hosts)
    return made


def test_hosts_are_named_one_by_one_or_in_a_file(tmp_path: Path) -> None:
    made = parsed("hosts:a,b1,me@c:2222,d,ranks=2,port=29400,python=/opt/python,ssh=ssh -F file")
    assert [remote.target for remote in made.remotes] == ["a", "b1", "me@c", "d"]
    assert [remote.name for remote in made.remotes] == ["a", "b1", "c", "d"]
    assert made.remotes[2].port == 2222
    assert (made.nodes, made.ranks, made.port, made.python) == (4, 2, 29400, "/opt/python")
    assert made.remotes[0].ssh == ("ssh", "-F", "file")
    assert parsed(made.text) == made
    file = tmp_path / "hosts"
    file.write_text("# ours\nnode1 slots=4\n\nme@[fd00::2]:22 ranks=8  # the large one\nnode3\n")
    made = parsed(f"hosts:{file},ranks=2")
    assert [(remote.name, remote.ranks) for remote in made.remotes] == [("node1", 4), ("fd00::2", 8), ("node3", 2)]
    assert parsed("hosts:localhost:1,localhost:2").remotes[1].name == "localhost:2"
    assert parsed("hosts:a,gpus=8").ranks == 8


@pytest.mark.parametrize(
    ("on", "told"),
    [
        ("hosts:", "names none"),
        ("hosts:./nodes.txt", "there is no file ./nodes.txt"),
        ("hosts:a,a", "a is there twice"),
        ("hosts:a:b:c", "is no host"),
        ("hosts:-oProxyCommand=x", "is not one of its options"),
        ("hosts:a,rank=2", "'rank' is not one of its options; did you mean 'ranks'"),
        ("hosts:a,port=99999", "port=99999 is no port"),
        ("hosts:a,code=there", "code=there means nothing"),
        ("hosts:a,ssh=ssh -o 'x", "is no command"),
    ],
)
def test_what_cannot_be_meant_is_refused(on: str, told: str) -> None:
    with pytest.raises(WrongUse, match=told):
        place_of(on)


def test_a_file_is_read_with_the_line_that_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a\nb cores=3\n")
    with pytest.raises(WrongUse, match="line 2: cores=3 means nothing"):
        place_of(f"hosts:{tmp_path / 'hosts'}")
    (tmp_path / "hosts").write_text("# none\n")
    with pytest.raises(WrongUse, match="names none"):
        place_of(f"hosts:{tmp_path / 'hosts'}")


def test_what_would_run_is_shown(tmp_path: Path) -> None:
    command = Command("python", ("gpt", "--min-nodes", "2"), tmp_path, tmp_path / "run", "gpt-001", 30.0)
    shown = parsed("hosts:a,me@b,ranks=4,port=29400").preview(command)
    first, second = shown.splitlines()
    assert first.startswith(f"a: cd {tmp_path} && python -m phalanx train gpt --min-nodes 2 --run {tmp_path / 'run'}")
    assert first.endswith("--on local:4 --resume --max-nodes 2 --meet a:29400 --host a")
    assert second.endswith("--meet a:29400 --host b")
    alone = parsed("hosts:a").preview(command)
    assert "--meet" not in alone


def test_hosts_with_different_ranks_need_a_layout(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a ranks=1\nb ranks=2\n")
    command = Command("python", ("gpt",), tmp_path, tmp_path, "gpt", 30.0)
    with pytest.raises(WrongUse, match="Give --layout"):
        parsed(f"hosts:{tmp_path / 'hosts'}").train(command, lambda: None)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SshHosts]:
    (tmp_path / "slow.py").write_text(TASK)
    with ssh_hosts(tmp_path) as made:
        yield made


class Started:
    """``phalanx train`` at the desk."""

    def __init__(self, cluster: SshHosts, *words: str, on: str = "hosts:node1,node2", run: str = "run") -> None:
        self.cluster, self.run = cluster, Run(cluster.folder / run)
        self.process = cluster.start("train", *words, "--on", on, "--run", run)

    def until(self, step: int) -> None:
        until(lambda: self.process.poll() is not None or self.step() >= step, 120)
        assert self.process.poll() is None, self.process.communicate()

    def step(self) -> int:
        path = self.run.events_path(0)
        return max((event["step"] for event in self.run.events(0, "step")), default=-1) if path.exists() else -1

    def ended(self, seconds: float = 240) -> tuple[int, str]:
        try:
            out, err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(self.process.communicate()) from None
        return self.process.returncode, out + err

    def worlds(self) -> list[int]:
        return [event["world"] for event in self.run.events(0, "start")]


def until(holds: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not in {seconds:g} s"
        time.sleep(0.2)


def weights(run: Run) -> str:
    return json.loads(run.certificate_path.read_text())["hash"]


def alone(folder: Path, *words: str) -> str:
    """The weights of the same run on this machine, left alone."""
    command = [sys.executable, "-m", "phalanx", "train", *words, "--on", "local:2", "--run", "alone"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return weights(Run(folder / "alone"))


def told(cluster: SshHosts, *words: str) -> str:
    out, err = cluster.start(*words).communicate(timeout=60)
    return out + err


@needs_ssh
def test_two_hosts_train_to_the_same_bits_as_this_machine(cluster: SshHosts) -> None:
    started = Started(cluster, *WORDS, "--steps", "20")
    code, said = started.ended()
    assert code == 0, said
    for words in (
        "hosts  node1",
        "host  1 of 2",
        "[node",
        "step 20/20",
        "certificate: 20 steps",
        "done on node1, node2",
    ):
        assert words in said
    assert started.worlds() == [2]
    assert weights(started.run) == alone(cluster.folder, *WORDS, "--steps", "20")
    assert cluster.processes() == []
    assert "run: done" in told(cluster, "status", "run")
    assert "step 20/20" in told(cluster, "logs", "run")
    assert "host  meets others" in (started.run.path / "hosts" / "node2.out").read_text()
    assert not (started.run.path / "key").exists(), "the key travels, and is written nowhere"


@needs_ssh
def test_what_is_wrong_ends_it_before_anything_is_started(cluster: SshHosts) -> None:
    code, said = Started(cluster, *WORDS, "--layout", "dp=3", on="hosts:node1,node2,node3").ended()
    assert code == 3
    assert "node3: is not reached over ssh: ssh: connect to host node3 port 22: Connection refused." in said
    assert "Traceback" not in said
    assert not (cluster.folder / "run").exists()


@needs_ssh
@pytest.mark.every
@pytest.mark.parametrize("way", ["Ctrl-C", "cancel"])
def test_who_asks_it_to_stop_has_all_hosts_save_and_end(cluster: SshHosts, way: str) -> None:
    started = Started(cluster, *EXACT, "--steps", "60")
    started.until(5)
    assert "running" in told(cluster, "status", "run")
    if way == "cancel":
        assert "ranks save what they have done" in told(cluster, "cancel", "run")
    else:
        started.process.send_signal(signal.SIGINT)
    code, said = started.ended()
    assert code == 130, said
    assert "saved up to step" in said
    assert "stopped on all hosts" in said
    assert cluster.processes() == []
    assert "ended, hosts job" in told(cluster, "status", "run")
    again = Started(cluster, "--resume", "--set", "pause=0")
    code, said = again.ended()
    assert code == 0, said
    assert weights(started.run) == alone(cluster.folder, *EXACT, "--steps", "60", "--set", "pause=0")


@needs_ssh
@pytest.mark.every
def test_killing_what_started_it_leaves_nothing(cluster: SshHosts) -> None:
    started = Started(cluster, *EXACT, "--steps", "600")
    started.until(5)
    assert len(cluster.processes()) > 6
    started.process.kill()
    started.process.communicate()
    until(lambda: cluster.processes() == [], 40)
    assert max(int(path.name.removeprefix("step-")) for path in started.run.checkpoints_path.glob("step-*")) >= 5
    assert "which was killed" in told(cluster, "status", "run")


@needs_ssh
@pytest.mark.every
@pytest.mark.parametrize("name", ["node2", "node1"])
def test_a_link_cut_for_20_s(cluster: SshHosts, name: str) -> None:
    started = Started(cluster, *EXACT, "--steps", "150", "--set", "pause=0.3")
    started.until(10)
    cluster.hosts.cut(name)
    time.sleep(20)
    cluster.hosts.mend(name)
    code, said = started.ended()
    assert code == 0, said
    assert "is lost" not in said
    worlds = started.worlds()
    assert (worlds[0], worlds[-1]) == (2, 2), worlds
    assert cluster.processes() == []
    assert weights(started.run) == alone(cluster.folder, *EXACT, "--steps", "150", "--set", "pause=0")


@needs_ssh
@pytest.mark.every
def test_a_link_cut_for_good(cluster: SshHosts) -> None:
    """The other host goes on to the end, and the supervisor that is cut off ends by itself."""
    started = Started(cluster, *EXACT, "--steps", "60")
    started.until(10)
    cluster.hosts.cut("node2")
    code, said = started.ended()
    assert code == 0, said
    assert started.worlds()[-1] == 1
    until(lambda: cluster.processes() == [], 120)
    assert weights(started.run) == alone(cluster.folder, *EXACT, "--steps", "60", "--set", "pause=0")


@needs_ssh
@pytest.mark.every
@pytest.mark.parametrize("name", ["node2", "node1"])
def test_a_host_that_is_lost_is_gone_on_without(cluster: SshHosts, name: str) -> None:
    """Also the first, where the others meet: they meet at another."""
    started = Started(cluster, *EXACT, "--steps", "60")
    started.until(25)
    cluster.lose(name)
    code, said = started.ended()
    assert code == 0, said
    assert f"host {name} is lost" in said
    assert started.worlds()[-1] == 1
    assert cluster.processes() == []
    assert weights(started.run) == alone(cluster.folder, *EXACT, "--steps", "60", "--set", "pause=0")


@needs_ssh
@pytest.mark.every
def test_a_host_that_comes_back_takes_part_again(cluster: SshHosts) -> None:
    started = Started(cluster, *EXACT, "--steps", "150", "--set", "pause=0.3")
    started.until(10)
    cluster.lose("node2")
    time.sleep(8)
    cluster.serve("node2")
    code, said = started.ended()
    assert code == 0, said
    assert "host  node2 is reached again" in said
    worlds = started.worlds()
    assert 1 in worlds, worlds
    assert (worlds[0], worlds[-1]) == (2, 2), worlds
    assert weights(started.run) == alone(cluster.folder, *EXACT, "--steps", "150", "--set", "pause=0")


@needs_ssh
@pytest.mark.every
def test_hosts_that_share_no_code_are_sent_it(cluster: SshHosts) -> None:
    folder = cluster.folder
    away = folder / "away"
    away.mkdir()
    (away / "slow.py").write_text("from parts.names import Slow as Base\n\n\nclass Slow(Base):\n    pass\n")
    (away / "parts").mkdir()
    (away / "parts" / "__init__.py").write_text("")
    (away / "parts" / "names.py").write_text(TASK)
    for name in cluster.names:
        cluster.hosts[name].hide(away)
    process = cluster.start(
        "train", *WORDS, "--steps", "10", "--on", "hosts:node1,node2", "--run", str(folder / "run"), at=away
    )
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    assert "files to each host" in out
    assert weights(Run(folder / "run")) == alone(folder, *WORDS, "--steps", "10")
    assert not list(folder.glob("cache-*/phalanx/code/*")), "a run that is done leaves its code nowhere"


@needs_ssh
@pytest.mark.every
def test_one_host_needs_no_meeting(cluster: SshHosts) -> None:
    started = Started(cluster, *WORDS, "--steps", "10", on="hosts:node2,ranks=2")
    code, said = started.ended()
    assert code == 0, said
    assert weights(started.run) == alone(cluster.folder, *WORDS, "--steps", "10")
