"""A run's folder that somebody else wrote: whoever looks at it runs no code, waits for nothing, and stays in it.

Each folder here is looked at by everything that reads one, in a process that may use a GiB more and has some minutes.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx import CannotHere, Run, WrongUse, flight
from phalanx.checkpoint.verify import verify
from phalanx.launch import standing
from phalanx.processes import aside
from phalanx.watch.page.answers import RunPages
from phalanx.watch.page.report import write_report
from phalanx.watch.page.watching import runs_of
from phalanx.watch.why import why
from tests.watch.page.folders import append, start, step, write

ROOM = 1 << 30
SECONDS = 300
DRAW = random.Random(0)
Damage = Callable[[Run], object]


def looked(folder: Path) -> dict[str, str]:
    """By what looks at a folder of runs: what it said of them, or how it refused."""

    def look() -> dict[str, str]:
        pages = resource.getpagesize()
        size = int(Path("/proc/self/statm").read_text().split()[0]) * pages + ROOM
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        signal.alarm(SECONDS)
        found = {}
        for name, use in uses(folder).items():
            try:
                found[name] = use()
            except (WrongUse, CannotHere, OSError) as error:
                found[name] = f"refused: {error}"
        return found

    return aside(look)


def uses(folder: Path) -> dict[str, Callable[[], str]]:
    run = Run(folder / "bad")
    found: dict[str, Callable[[], str]] = {
        "runs": lambda: standing.table(standing.listed(folder)) + "".join(e.to_json() for e in standing.listed(folder)),
        "status": lambda: str(standing.Standing.of(run)),
        "why": lambda: str(why(run)) + why(run).to_json(),
        "logs": lambda: str(standing.show_logs(run, keep_on=False)),
        "cancel": lambda: standing.cancel(run),
        "verify": lambda: str(verify(str(run.path))),
        "report": lambda: write_report(run).read_text()[-1000:],
        "list": lambda: asked(folder, "runs"),
    }
    for what in ("run", "charts", "heat", "spans", "memory", "verdict", "links"):
        found[what] = lambda what=what: asked(folder, what, run="bad")  # type: ignore[misc]
    return found


def asked(folder: Path, what: str, **query: str) -> str:
    """What a watch of the folder answers, which must be JSON that a browser reads."""
    answer = RunPages(runs_of(folder)).answer(f"/api/{what}", query)[0].decode()
    json.loads(answer, parse_constant=pytest.fail)
    return answer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two runs, one of which is to be damaged; beside them what nobody should see."""
    for name in ("good", "bad"):
        write(tmp_path / "runs" / name, 2, 20)
    other = write(tmp_path / "secret", 1, 5, key="secret")
    other.certificate_path.parent.mkdir()
    other.certificate_path.write_text('{"steps": 5, "code": "secret"}')
    (other.path / "proof.json").write_text('{"class": "secret", "code": "abc", "results": []}')
    (tmp_path / "secret.txt").write_text("secret\n")
    return tmp_path / "runs"


def text(name: str, content: str | bytes) -> Damage:
    def damage(run: Run) -> None:
        path = run.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    return damage


def pipe(name: str) -> Damage:
    def damage(run: Run) -> None:
        path = run.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        os.mkfifo(path)

    return damage


def sparse(name: str, size: int) -> Damage:
    def damage(run: Run) -> None:
        path = run.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.truncate(size)

    return damage


def event(**fields: Any) -> Damage:
    """One more event of rank 0."""
    return lambda run: append(run, 0, {"time": 1.7949e9 + 10, **fields})


def packed(rank: int, header: int, memory: bytes | None = None, generation: int = 1) -> Damage:
    """A flight record in the file of a rank, which says to be of another."""

    def damage(run: Run) -> None:
        content = bytearray(flight.BYTES)
        flight.HEADER.pack_into(
            content, 0, flight.MAGIC, header, 1 << 31, generation, os.getpid(), os.getpid(), b"h", 0
        )
        path = flight.folder(run, generation) / f"rank-{rank:05d}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(zlib.compress(bytes(content) if memory is None else memory, 9))

    return damage


def line(event: dict[str, Any]) -> str:
    return f"{json.dumps(event)}\n"


def garbage_record(run: Run) -> None:
    """Numbers of kinds, groups and places that there are not."""
    content = bytearray(b"\xfe" * flight.BYTES)
    flight.HEADER.pack_into(content, 0, flight.MAGIC, 0, 2, 1, os.getpid(), os.getpid(), b"h", 0)
    struct.pack_into("<5q", content, flight.NOW_AT, 3, 1, 1, 1, 1)
    packed(0, 0, bytes(content))(run)


FILES = (
    "run.toml", "generation", "lock", "place.json", "proof.json", "final/certificate.json", "events/rank-00000.jsonl",
    "events/rank-00001.jsonl", "events/host-00000.jsonl", "flight/generation-00001/rank-00000",
    "stacks/generation-00001/rank-00000.txt", "failures/generation-00001-from-00000.json", "manifest.json",
    "hosts/lock", "hosts/code", "report.html",
)  # fmt: skip
ACCOUNT = {"host": "h", "generation": 1, "steps": 1, "time": 1.0, "failures": []}
FAILURE = {
    "rank": 0, "reason": "x", "trace": "", "file": "", "final": False, "secondary": False, "timed_out": False,
    "stuck": False,
}  # fmt: skip
NOTHINGS: dict[str, bytes] = {
    "list": b"[]", "text": b'"x"', "number": b"3", "null": b"null", "object": b"{}",
    "lists": b'{"steps": [], "a": [1]}',
    "nan": b'{"steps": NaN, "loss": Infinity}', "deep": b"[" * 100_000, "zeros": bytes(10_000), "long": b"9" * 10_000,
    "bytes": bytes(range(256)) * 40, "surrogate": b'{"kind": "step", "time": 1, "step": 1, "turn": "\\ud800"}\n',
}  # fmt: skip
ODD_EVENTS: dict[str, Damage] = {
    "step 1e9": event(kind="step", step=10**9, loss=1.0, seconds={"forward": 1.0}),
    "step 2**52": event(kind="step", step=1 << 52, loss=1.0, seconds={"forward": 1.0}),
    "of 1e12": event(kind="step", step=10**5, of=10**12, loss=1.0, seconds={"forward": 1.0}, sent={}),
    "start at 1e15": event(kind="start", step=10**15, generation=3, world=10**9),
    "generation 2**30": event(kind="start", step=1, generation=1 << 30),
    "evaluation of step 1e12": event(kind="evaluation", step=10**12, held_out={"loss": 1.0}),
    "left out 1e15": event(kind="left out", step=10**15, samples="x"),
    "100,000 names": event(kind="step", step=10**5, logged={f"n{n}": 1.0 for n in range(100_000)}),
    "a line of 30 MB": text("events/rank-00000.jsonl", b'{"kind": "step", "x": "' + b"x" * (30 << 20) + b'"}\n'),
    "a million lists": event(kind="bad", step=1, reason="x", found=[], sample_ids=[[]] * 10**6),
    "a trace of many files": text(
        "failures/generation-00001-from-00000.json",
        json.dumps(ACCOUNT | {"failures": [FAILURE | {"trace": 'File "' * 300_000}]}),
    ),
    "a clock far ahead": event(kind="step", time=9e10, step=21, loss=1.0, seconds={"forward": 1.0}),
    "a reason of 3 MB": event(kind="failure", reason="x\x1b[2J" * 500_000),
}
BOMBS: dict[str, Damage] = {
    "a record that unpacks to 4 GB": packed(0, 0, bytes(1 << 20) * 64),
    "rank 4e9": packed(0, 4_000_000_000),
    "a record of rank 99999": packed(99_999, 99_999),
    "records without sense": garbage_record,
    "events of rank 99,999,999": text("events/rank-99999999.jsonl", line(step(0, 5, DRAW))),
    "events of rank 99,999": text("events/rank-99999.jsonl", line(start(99_999, 10**5))),
    "100,000 ranks by 1e6 steps": text("events/rank-99999.jsonl", line(step(99_999, 10**6, DRAW))),
    "a run.toml of 50 MB": text("run.toml", b"[run]\ntask = \"x\"\n" + b"a = 1\n" * (9 << 20)),
    "a run.toml of dots": text("run.toml", b"[" + b"a." * 150_000 + b"a]\n"),
    "a run.toml of brackets": text("run.toml", b"a = " + b"[" * 400_000),
    "a terabyte of events": sparse("events/rank-00000.jsonl", 1 << 40),
    "a terabyte of another rank's": sparse("events/rank-00007.jsonl", 1 << 40),
    "a terabyte of a certificate": sparse("final/certificate.json", 1 << 40),
    "a terabyte of a record": sparse("flight/generation-00001/rank-00000", 1 << 40),
    "a terabyte of stacks": sparse("stacks/generation-00001/rank-00000.txt", 1 << 40),
    "a terabyte of a host": sparse("events/host-00000.jsonl", 1 << 40),
    "a certificate of 1e9 ranks": text("final/certificate.json", '{"steps": 9007199254740991, "world": 1000000000}'),
    "steps that are no number": text("run.toml", '[run]\ntask = 3\nlayout = [1]\n[settings]\nsteps = inf\n'),
    "texts for tables": text("run.toml", 'run = "x"\nsettings = [1]\n'),
}  # fmt: skip


def check_good(found: dict[str, str]) -> None:
    """The other run is shown as if nothing were."""
    assert "good" in found["runs"]
    assert '"name": "good"' in found["list"]


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_in_the_place_of_a_file(folder: Path, name: str) -> None:
    pipe(name)(Run(folder / "bad"))
    found = looked(folder)
    check_good(found)
    assert "Traceback" not in str(found)


@pytest.mark.parametrize("name", FILES)
def test_a_folder_in_the_place_of_a_file(folder: Path, name: str) -> None:
    path = folder / "bad" / name
    path.unlink(missing_ok=True)
    path.mkdir(parents=True)
    check_good(looked(folder))


@pytest.mark.parametrize("name", FILES)
def test_anything_else_in_a_file(folder: Path, name: str) -> None:
    for content in NOTHINGS.values():
        text(name, content)(Run(folder / "bad"))
        check_good(looked(folder))


@pytest.mark.parametrize("what", ODD_EVENTS)
def test_odd_events(folder: Path, what: str) -> None:
    ODD_EVENTS[what](Run(folder / "bad"))
    check_good(looked(folder))


@pytest.mark.parametrize("what", BOMBS)
def test_bombs(folder: Path, what: str) -> None:
    BOMBS[what](Run(folder / "bad"))
    check_good(looked(folder))


def test_no_link_leads_out_of_a_run(folder: Path) -> None:
    run, other = Run(folder / "bad"), Run(folder.parent / "secret")
    before = {path: path.read_bytes() for path in other.path.rglob("*") if path.is_file()}
    for name in FILES:
        path = run.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        there = other.path / name
        path.symlink_to(there if there.exists() else folder.parent / "secret.txt")
    found = looked(folder)
    check_good(found)
    assert "secret" not in str({name: said for name, said in found.items() if name != "report"}).replace(
        str(folder.parent), ""
    )
    for name in ("events", "final", "flight", "stacks", "failures"):
        path = run.path / name
        subprocess.run(["rm", "-rf", path], check=True)
        path.symlink_to(other.path / name)
    found = looked(folder)
    check_good(found)
    assert "1.5" not in found["charts"]
    assert before == {path: path.read_bytes() for path in other.path.rglob("*") if path.is_file()}
    assert (folder.parent / "secret.txt").read_text() == "secret\n"


def test_a_proof_of_another_folder_is_not_shown(folder: Path) -> None:
    run = Run(folder / "bad")
    run.certificate_path.parent.mkdir()
    run.certificate_path.write_text('{"steps": 20, "code": "abc"}')
    run.write_settings({"run": {"folder": str(folder.parent)}, "settings": {"steps": 20}})
    os.rename(folder.parent / "secret", folder.parent / "runs2")
    (folder.parent / "runs2" / "x").mkdir()
    for place in ("runs2", "runs2/x"):
        (folder.parent / place / "proof.json").write_text('{"class": "secret", "code": "abc", "results": []}')
    run.write_settings({"run": {"folder": str(folder.parent / "runs2")}, "settings": {"steps": 20}})
    found = looked(folder)
    assert "secret" not in found["run"] + found["report"]


def test_hundreds_of_thousands_of_entries(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.folder_files.MOST_NAMES", 1000)
    run = Run(folder / "bad")
    for name in ("events", "flight", "failures", "stacks/generation-00001"):
        (run.path / name).mkdir(parents=True, exist_ok=True)
        for number in range(1500):
            (run.path / name / f"rank-{number:05d}x").touch()
    for number in range(1500):
        (folder / f"zzz-{number}").mkdir()
    check_good(looked(folder))


def test_looking_runs_no_code(folder: Path, tmp_path: Path) -> None:
    """A configuration of kubectl's that starts a program, named where a job's name belongs; and other such words."""
    evil = tmp_path / "evil.yaml"
    proof = tmp_path / "was run"
    program = {"apiVersion": "client.authentication.k8s.io/v1", "command": "touch", "args": [str(proof)]}
    program |= {"interactiveMode": "Never"}
    users = [{"name": "u", "user": {"exec": program}}]
    contexts = [{"name": "c", "context": {"cluster": "c", "user": "u"}}]
    clusters = [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}]
    config = {"apiVersion": "v1", "kind": "Config", "current-context": "c"}
    evil.write_text(json.dumps({**config, "clusters": clusters, "users": users, "contexts": contexts}))
    for on, job in (
        ("kubernetes:image=x", f"--kubeconfig={evil}"),
        (f"kubernetes:image=x,namespace=--kubeconfig={evil}", "job"),
        (f"kubernetes:image=x,namespace=a --kubeconfig={evil}", "job"),
        (f"hosts:n1,ssh=touch {proof}", "12@n1"),
        (f"hosts:n1,python=touch {proof};", "12@n1"),
        ("slurm", f"$(touch {proof})"),
        ("ray", f"`touch {proof}`"),
    ):
        (folder / "bad" / "place.json").write_text(json.dumps({"on": on, "job": job}))
        check_good(looked(folder))
        assert not proof.exists(), on


def test_a_store_that_is_made_of_others_is_not_opened(folder: Path, tmp_path: Path) -> None:
    """Whose references are templates, which run what is written in them."""
    run = Run(folder / "bad")
    for url in ("reference::file:///x.json", "simplecache::s3://x", "filecache::http://127.0.0.1:1/x"):
        run.write_settings({"run": {"task": "gpt", "checkpoints": url}})
        with pytest.raises(WrongUse, match="which is not opened for that"):
            verify(str(run.path))
    run.write_settings({"run": {"task": "gpt", "checkpoints": 3}})
    with pytest.raises(WrongUse, match="which is not opened for that"):
        verify(str(run.path))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to have another user's file")
def test_a_store_that_another_user_names_is_not_opened(folder: Path) -> None:
    run = Run(folder / "bad")
    run.write_settings({"run": {"task": "gpt", "checkpoints": "http://127.0.0.1:1/x"}})
    os.chown(run.settings_path, 54321, -1)
    with pytest.raises(WrongUse, match=r"run.toml, which belongs to user 54321, keeps its checkpoints"):
        verify(str(run.path))


def test_a_lock_that_is_a_link_leaves_its_target_as_it_is(folder: Path) -> None:
    run = Run(folder / "bad")
    (run.path / "lock").symlink_to(folder.parent / "secret.txt")
    with pytest.raises(WrongUse, match="bad/lock is a link"), run.held():
        pass
    assert (folder.parent / "secret.txt").read_text() == "secret\n"
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "train", "gpt", "--resume", "--run", str(run.path), "--device", "cpu"],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=folder.parent,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "is a link" in done.stderr
    assert (folder.parent / "secret.txt").read_text() == "secret\n"


def test_logs_show_no_file_of_another_folder(folder: Path) -> None:
    run = Run(folder / "bad")
    (run.path / "slurm").mkdir()
    (run.path / "slurm" / "12.out").symlink_to(folder.parent / "secret.txt")
    (run.path / "place.json").write_text(json.dumps({"on": "slurm", "job": "12"}))
    assert "secret" not in looked(folder)["logs"].replace(str(folder.parent), "")


def test_it_does_not_take_long(folder: Path) -> None:
    began = time.monotonic()
    looked(folder)
    assert time.monotonic() - began < SECONDS
