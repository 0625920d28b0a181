"""Keeping state: what is written is the state of its step, and a save that fails costs nothing but itself."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx import Layout
from phalanx.checkpoint import store as store_of
from phalanx.checkpoint import write
from phalanx.checkpoint.slot import Slot
from phalanx.errors import CannotHere
from phalanx.train import checkpointing as keeping_of
from phalanx.train.checkpointing import Checkpointer
from phalanx.train.engine import Engine
from phalanx.train.policy import Policy
from tests.checkpoints import checkpointing, contents, manager_at, newest, trained
from tests.forking import fork
from tests.parity import HostileVision
from tests.ranks import Ranks
from tests.tasks import Digits

EVERY_STEP = Policy(steps=1, minutes=0, memory_steps=0, keep=100)


def step_on(engine: Engine, checkpointer: Checkpointer, steps: int, after: Callable[[], None] = lambda: None) -> None:
    for batch in islice(engine.batches(), steps):
        checkpointer.before_step()
        checkpointer.after_step(engine.step(batch).signals, last=False)
        after()


def state(checkpointer: Checkpointer) -> dict[str, Tensor]:
    return {entry.name: entry.value.clone() for entry in checkpointer.state.entries()}


def test_what_is_written_is_the_state_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on while it is copied, slowly; batch-norm's averages change in the forward already."""
    real = Checkpointer.copy

    def slow(checkpointer: Checkpointer, work: Any) -> None:
        time.sleep(0.3)
        real(checkpointer, work)

    monkeypatch.setattr(Checkpointer, "copy", slow)
    with Engine(HostileVision(), device="cpu") as engine, checkpointing(engine, tmp_path) as checkpointer:
        step_on(engine, checkpointer, 1)
        expected = state(checkpointer)
        checkpointer.stage(save=True)
        step_on(engine, checkpointer, 2)
        assert not torch.equal(state(checkpointer)["model/head.weight"], expected["model/head.weight"])
        checkpointer.drain()
        found = contents(tmp_path)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name].reshape(-1), tensor.reshape(-1)) for name, tensor in expected.items())
        assert newest(tmp_path).manifest.step == 1
        # and writing it has left the copy in memory as it was
        kept = next(slot.staged() for slot in checkpointer.slots if slot.step() == 1)
        assert all(torch.equal(tensor, found[place.name].view(tensor.shape)) for place, tensor in kept.tensors)


def test_old_files_are_let_go_once_the_new_one_is_there(tmp_path: Path) -> None:
    noted: list[dict[str, Any]] = []
    policy = Policy(steps=1, minutes=0, memory_steps=0, keep=2, keep_every=3)
    with (
        Engine(Digits(steps=8), device="cpu") as engine,
        checkpointing(engine, tmp_path, policy, note=lambda kind, **fields: noted.append(fields)) as checkpointer,
    ):
        step_on(engine, checkpointer, 8, checkpointer.drain)
    assert manager_at(tmp_path).steps() == [3, 6, 7, 8]
    assert [note["let_go"] for note in noted] == [[], [], [1], [2], [], [4], [5], []]


def test_nothing_old_is_let_go_for_what_does_not_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(Digits(), "dp=1", tmp_path, None, 1)
    noted: list[dict[str, Any]] = []
    read = store_of.Folder.read

    def spoiled(store: Any, name: str, start: int = 0, stop: int | None = None) -> bytes:
        found = bytearray(read(store, name, start, stop))
        found[-1] ^= name.endswith("safetensors") and start > 0
        return bytes(found)

    policy = Policy(steps=1, minutes=0, memory_steps=0, keep=1)
    with (
        Engine(Digits(), device="cpu") as engine,
        checkpointing(engine, tmp_path, policy, note=lambda kind, **fields: noted.append(fields)) as checkpointer,
    ):
        monkeypatch.setattr(store_of.Folder, "read", spoiled)
        engine.step_number = 1
        step_on(engine, checkpointer, 1, checkpointer.drain)
    assert "part-00000.safetensors has changed since it was written" in noted[0]["failed"]
    assert manager_at(tmp_path).steps() == [1]


# Disks that are full.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, Callable[[], None], Callable[[], None]]]:
    """A folder, how to fill its disk, and how to make room; where nothing can be mounted files cannot grow instead."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True
    ).returncode
    ballast, limits = folder / "ballast", resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill() -> None:
        if mounted:
            with ballast.open("wb") as file:
                file.truncate(0)
                left = shutil.disk_usage(folder).free - 4096
                file.write(bytes(left))
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))

    def make_room() -> None:
        ballast.unlink(missing_ok=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    yield folder, fill, make_room
    make_room()
    if mounted:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("told", [True, False], ids=["free space is told", "the write fails"])
def test_a_full_disk_costs_only_the_save(
    told: bool, small_disk: tuple[Path, Callable[[], None], Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, fill, make_room = small_disk
    noted: list[dict[str, Any]] = []
    if not told:
        monkeypatch.setattr(store_of.Folder, "free", lambda store: None)
    with (
        Engine(Digits(width=64, steps=9), device="cpu") as engine,
        checkpointing(
            folder=folder, engine=engine, policy=EVERY_STEP, note=lambda kind, **f: noted.append(f)
        ) as checkpointer,
    ):
        step_on(engine, checkpointer, 1, checkpointer.drain)
        before = {path: path.read_bytes() for path in folder.glob("step-*/*")}
        fill()
        step_on(engine, checkpointer, 2, checkpointer.drain)
        assert all("bytes free" in note["failed"] or "OSError" in note["failed"] for note in noted[1:]), noted
        assert [note["step"] for note in noted] == [1, 2, 3]
        monkeypatch.setattr(keeping_of, "FULL_ATTEMPTS", 2)
        with pytest.raises(CannotHere, match=r"step 3 could not be saved: .*--resume"):
            checkpointer.save_now()
        assert {path: path.read_bytes() for path in folder.glob("step-*/*")} == before
        assert not manager_at(folder).leftovers()
        make_room()
        step_on(engine, checkpointer, 1, checkpointer.drain)
    assert manager_at(folder).steps() == [1, 4]
    assert not list(newest(folder).verify())


def test_the_last_save_waits_for_room(
    small_disk: tuple[Path, Callable[[], None], Callable[[], None]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, fill, make_room = small_disk
    with (
        Engine(Digits(width=64), device="cpu") as engine,
        checkpointing(folder=folder, engine=engine, policy=EVERY_STEP) as checkpointer,
    ):
        step_on(engine, checkpointer, 1, checkpointer.drain)
        fill()
        step_on(engine, checkpointer, 1, checkpointer.drain)
        later = threading.Timer(0.4, make_room)
        later.start()
        checkpointer.save_now()
        later.join()
    assert manager_at(folder).steps() == [1, 2]
    said = capsys.readouterr().out
    assert said.count("could not be saved, going on") == 1, "once, however often it was tried"
    assert "step 2 is saved: checkpoints can be written again" in said


def grow(checkpointer: Checkpointer) -> None:
    """Give the slots their memory now: it is a file to the system, and could not grow later."""
    for slot in checkpointer.slots:
        slot._open(1 << 16)


def short_of_room(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """On the second rank alone files cannot grow for a while."""
    noted: list[dict[str, Any]] = []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (
        Engine(Digits(width=64, steps=100), Layout(fsdp=2), device="cpu") as engine,
        checkpointing(engine, folder, EVERY_STEP, note=lambda kind, **fields: noted.append(fields)) as checkpointer,
    ):
        step_on(engine, checkpointer, 1, checkpointer.drain)
        grow(checkpointer)
        try:
            if engine.environment.rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
            step_on(engine, checkpointer, 12, lambda: time.sleep(0.03))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        step_on(engine, checkpointer, 12, lambda: time.sleep(0.03))
        checkpointer.save_now()
        return noted, engine.step_number


def test_one_rank_without_room_costs_only_the_save(ranks: Ranks, tmp_path: Path) -> None:
    (first, steps), (second, _) = ranks(2, short_of_room, tmp_path)
    assert steps == 25, "training went on"
    assert any("OSError" in note.get("failed", "") for note in second)
    assert any("1 of 2 parts are missing, part-00001" in note.get("failed", "") for note in first)
    failed = [note["step"] for note in first if "failed" in note]
    saved = manager_at(tmp_path).steps()
    assert saved[0] == 1
    assert not set(failed) & set(saved)
    assert all(step < 14 for step in failed), "with room again, the next save works at once"
    assert saved[-1] == 25
    for step in saved:
        assert not list(manager_at(tmp_path).open(step).verify())


def short_of_room_at_the_end(folder: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (
        Engine(Digits(width=64), Layout(fsdp=2), device="cpu") as engine,
        checkpointing(engine, folder) as checkpointer,
    ):
        step_on(engine, checkpointer, 1)
        grow(checkpointer)
        try:
            if engine.environment.rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
            checkpointer.stage(save=True)
            if engine.environment.rank == 1:
                checkpointer.drain()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        checkpointer.save_now()


def test_the_last_save_does_not_wait_for_one_that_failed(ranks: Ranks, tmp_path: Path) -> None:
    """No step comes any more with which the second rank could say so."""
    ranks(2, short_of_room_at_the_end, tmp_path)
    assert manager_at(tmp_path).steps() == [1]
    assert not list(newest(tmp_path).verify())


# Ranks that are killed.

MOMENTS = {
    "staging": (Slot, "seal", 1),
    "sealing": (Slot, "_mark", 2),
    "writing": (write.PartWriter, "_note", 3),
    "between a file and its description": (write, "check_file", 1),
    "committing": (store_of, "sync_folder", 1),
    "appearing": (os, "rename", 4),
}
"""In which call of what, after the first checkpoint."""


def killed(folder: Path, moment: str) -> None:
    slots = [Slot(os.open(folder / f"slot {n}", os.O_RDWR | os.O_CREAT)) for n in range(2)]
    with (
        Engine(Digits(), device="cpu") as engine,
        checkpointing(engine, folder / "checkpoints", EVERY_STEP, slots=slots, generation=1) as checkpointer,
    ):
        step_on(engine, checkpointer, 1, checkpointer.drain)
        owner, name, call = MOMENTS[moment]
        real, calls = getattr(owner, name), iter(range(1, 100))

        def kill(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(owner, name, kill)
        step_on(engine, checkpointer, 1, checkpointer.drain)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_leaves_what_is_whole_and_nothing_else(moment: str, tmp_path: Path) -> None:
    process = fork(killed, tmp_path, moment)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    slots = [Slot(os.open(tmp_path / f"slot {n}", os.O_RDWR)) for n in range(2)]
    steps = {slot.step() for slot in slots}
    assert steps == ({1, None} if moment in ("staging", "sealing") else {1, 2})
    manager = manager_at(tmp_path / "checkpoints")
    assert manager.steps() == [1]
    assert not list(manager.open(1).verify())
    first = manager.open(1)
    kept = next(slot.staged() for slot in slots if slot.step() == 1)
    assert all(torch.equal(tensor, first.tensor(place.name).view(tensor.shape)) for place, tensor in kept.tensors)
    manager.fence(2)
    assert not manager.leftovers()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [".writing-00002", "step-00000001"]
