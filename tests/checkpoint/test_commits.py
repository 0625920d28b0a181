"""Commits: the newest generation's alone, however late an older one comes; on S3 too, spoken to as it is."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import fsspec
import pytest

from phalanx import CannotHere
from phalanx.checkpoint.commits import KEPT, LOG, ByLog, Fenced, commits_of
from phalanx.checkpoint.manager import CheckpointManager
from phalanx.checkpoint.store import Remote, open_store
from tests.checkpoint.test_manager import commit, save, write
from tests.checkpoints import newest, trained
from tests.ports import free_port
from tests.tasks import Digits
from tests.test_cli import TASK, phalanx


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "memory":
        yield "memory://commits-test"
        fsspec.filesystem("memory").rm("/commits-test", recursive=True)
        return
    yield request.getfixturevalue("s3")


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[str]:
    """One that speaks S3's protocol, on loopback; why there is none, if there is none."""
    missing = [name for name in ("s3fs", "moto", "flask") if importlib.util.find_spec(name) is None]
    if missing:
        yield f"there is no {missing[0]}: pip install s3fs 'moto[server]'"
        return
    port = free_port()
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    known = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    before = dict(os.environ)
    os.environ |= known | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    deadline = time.monotonic() + 60
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            break
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    fsspec.filesystem("s3").mkdir("bucket")  # and with it the thread that fsspec keeps
    yield ""
    process.kill()
    process.wait()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def s3(server: str) -> str:
    if server:
        pytest.skip(server)
    return f"s3://bucket/{uuid.uuid4()}"


def test_an_object_is_created_once(url: str) -> None:
    store = open_store(url)
    assert isinstance(store, Remote)
    store.create("a/one", b"first")
    with pytest.raises(FileExistsError):
        store.create("a/one", b"second")
    assert store.read("a/one") == b"first"
    store.delete("a/one")
    store.create("a/one", b"third")
    assert store.warning() == ""


def test_an_old_generation_does_not_overwrite_a_newer_ones_checkpoint(url: str) -> None:
    """It was stopped between its last look at the fence and its commit, and is as sure as it can be."""
    old, new = CheckpointManager(open_store(url)), CheckpointManager(open_store(url))
    old.fence(1)
    for rank in range(2):
        write(old, 1, 5, rank)
    looked = ByLog.check
    stopped, goes_on = threading.Event(), threading.Event()

    def look(generation: int) -> None:
        looked(old.commits, generation)
        stopped.set()
        goes_on.wait()

    old.commits.check = look  # type: ignore[method-assign]
    found: list[BaseException] = []

    def late() -> None:
        try:
            commit(old, 1, 5)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=late)
    thread.start()
    stopped.wait()
    new.fence(2)
    save(new, 2, 5)
    before = {name: new.store.read(f"{new.name(5)}/{name}") for name in new.store.names(new.name(5))}
    goes_on.set()
    thread.join()
    assert isinstance(found[0], Fenced)
    assert new.steps() == [5]
    assert {name: new.store.read(f"{new.name(5)}/{name}") for name in new.store.names(new.name(5))} == before
    assert not list(new.open(5).verify())
    with pytest.raises(Fenced):
        CheckpointManager(open_store(url)).fence(1)


def test_a_log_stays_short_and_whoever_is_very_late_is_noticed() -> None:
    store = open_store("memory://commits-log")
    log = commits_of(store)
    assert isinstance(log, ByLog)
    for generation in range(1, KEPT + 5):
        log.fence(generation)
    assert len(store.names(LOG)) == KEPT
    assert log.generation() == KEPT + 4
    first = log._newest
    log._newest = lambda: (1, first()[1])  # type: ignore[method-assign]
    numbers, asked = log._numbers, iter(range(2))

    def again() -> list[int]:
        if next(asked, None) == 0:
            log._newest = first  # type: ignore[method-assign]
        return numbers()

    log._numbers = again  # type: ignore[method-assign]
    log.fence(KEPT + 5)
    assert store.names(LOG)[-1] == f"{KEPT + 5:08d}"
    assert len(store.names(LOG)) == KEPT
    fsspec.filesystem("memory").rm("/commits-log", recursive=True)


def test_what_an_older_version_committed_is_taken_into_the_log(url: str) -> None:
    store = open_store(url)
    with store.write("step-00000003/manifest.json") as file:
        file.write(b"?")
    log = commits_of(store)
    assert log.folders() == {3: "step-00000003"}
    log.fence(1)
    assert log.folders() == {3: "step-00000003"}


@pytest.mark.parametrize("content", [b"", b"[", b"[]", json.dumps({"generation": 1, "steps": {"3": "../a"}}).encode()])
def test_a_log_that_makes_no_sense_is_damage(content: bytes) -> None:
    store = open_store("memory://commits-odd")
    assert isinstance(store, Remote)
    store.create(f"{LOG}/00000001", content)
    with pytest.raises(CannotHere, match="log/00000001, which lists the checkpoints, cannot be understood"):
        commits_of(store).folders()
    fsspec.filesystem("memory").rm("/commits-odd", recursive=True)


def test_a_run_on_s3(s3: str, tmp_path: Path) -> None:
    trained(Digits(), "dp=1", s3, None, 2)
    assert not list(newest(s3).verify())
    words = ["train", f"{TASK}:Digits", "--on", "local:2", "--checkpoints", f"{s3}/2", "--save-steps", "2"]
    done = phalanx(*words, "--run", "one", "--steps", "8", "--kill", "1@5", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert phalanx("verify", f"{s3}/2", cwd=tmp_path).returncode == 0
    assert newest(f"{s3}/2").manifest.step == 8
