"""C that is compiled when it is first used: once, by whoever comes first, and never for long."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
from pathlib import Path

import pytest

from phalanx.kernels.compiled import NotYet, built, loaded

if not any((Path(folder) / "cc").exists() for folder in os.get_exec_path()):
    pytest.skip("there is no compiler", allow_module_level=True)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    path = tmp_path / "seven.c"
    path.write_text("int seven(void) { return SEVEN; }\n")
    return path


def slow_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that notes when it is called, and takes half a second longer."""
    path = folder / "slow-cc"
    path.write_text(f'#!/bin/sh\necho called >> {folder / "calls"}\nsleep 0.5\nexec cc "$@"\n')
    path.chmod(0o755)
    monkeypatch.setenv("CC", str(path))
    return folder / "calls"


def at_once(source: Path, processes: int) -> list[int | None]:
    context = multiprocessing.get_context("fork")
    hosts = [context.Process(target=built, args=(source, ["-DSEVEN=7"])) for _ in range(processes)]
    for host in hosts:
        host.start()
    for host in hosts:
        host.join()
    return [host.exitcode for host in hosts]


def test_it_is_built_once_for_its_source_and_flags(source: Path) -> None:
    found = built(source, ["-DSEVEN=7"])
    assert ctypes.CDLL(str(found)).seven() == 7
    before = found.stat().st_mtime_ns
    assert built(source, ["-DSEVEN=7"]).stat().st_mtime_ns == before
    assert ctypes.CDLL(str(built(source, ["-DSEVEN=8"]))).seven() == 8


def test_ranks_that_start_at_once_build_it_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = slow_compiler(tmp_path, monkeypatch)
    assert at_once(source, 4) == [0] * 4
    assert calls.read_text().count("called") == 1


def test_hosts_that_share_a_folder_and_no_lock_build_apart(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = slow_compiler(tmp_path, monkeypatch)
    monkeypatch.setattr("fcntl.flock", lambda *given: None)
    assert at_once(source, 2) == [0, 0]
    assert calls.read_text().count("called") == 2
    whole = built(source, ["-DSEVEN=7"])
    assert sorted(path.name for path in whole.parent.iterdir()) == ["building", "whole.so"]
    assert ctypes.CDLL(str(whole)).seven() == 7


def test_nobody_waits_for_long_and_the_next_has_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = slow_compiler(tmp_path, monkeypatch)
    with pytest.raises(NotYet, match=r"compiled code is still being built"):
        built(source, ["-DSEVEN=7"], seconds=0.2)
    with pytest.raises(NotYet, match=r"another process builds compiled code for longer than 0.1 s"):
        built(source, ["-DSEVEN=7"], seconds=0.1)
    assert ctypes.CDLL(str(built(source, ["-DSEVEN=7"], seconds=60))).seven() == 7
    assert calls.read_text().count("called") == 1


def test_what_a_compiler_says_is_said(source: Path) -> None:
    def load() -> Path:
        return built(source, [])

    with pytest.warns(
        UserWarning, match=r"sevens are slow: compiled code cannot be had \(cc: .*SEVEN.*\). Install a C compiler and"
    ):
        assert loaded(source, load, "sevens are slow") is None
