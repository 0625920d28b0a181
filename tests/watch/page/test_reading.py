"""Files are read on from where they were, and by several processes as by one."""

from __future__ import annotations

import signal
import time
from functools import partial
from pathlib import Path

import pytest

from phalanx.watch.page import reading
from phalanx.watch.page.reading import EventFile, helpers, known_files, read_on
from phalanx.watch.page.table import RunTable
from tests.watch.page.folders import append, write


def test_a_file_is_read_on(tmp_path: Path) -> None:
    run, file = write(tmp_path / "run", 1, 2), EventFile(0)
    data, another = file.more(run)
    assert (data.count(b"\n"), another) == (3, False)
    assert file.more(run) == (b"", False)
    append(run, 0, {"kind": "end"})
    assert file.more(run) == (b'{"kind": "end"}\n', False)
    text = run.events_path(0).read_bytes()
    run.events_path(0).write_bytes(text[:100])  # cut short: what is left has no whole line
    assert file.more(run) == (b"", True)
    run.events_path(0).write_bytes(text)
    assert file.more(run)[0] == text
    run.events_path(0).unlink()
    assert file.more(run) == (b"", False)
    assert list(known_files(run)) == []


def test_several_processes_read_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write(tmp_path / "run", 5, 50)
    alone, helped = RunTable(run), RunTable(run)
    alone.refresh()
    assert helpers(run, helped.files()) is None, "it is not worth it"
    monkeypatch.setattr(reading, "MUCH", 1)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    pool = helpers(run, helped.files())
    assert pool is not None
    with pool:
        for new in pool.imap(partial(read_on, run), helped.files()):
            assert helped.take([new])
    pool.join()
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert helped.moments == alone.moments
    for phase in alone.phases:
        assert (helped.seconds[phase].values == alone.seconds[phase].values).all()
    assert not helped.refresh(), "it knows how far others have read"


def test_a_process_that_is_ended_while_it_starts_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though whom it helps does something else when it is ended."""
    run = write(tmp_path / "run", 2, 5)
    table = RunTable(run)
    monkeypatch.setattr(reading, "MUCH", 1)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    plain = reading._heed_nobody

    def slowly() -> None:
        time.sleep(1)
        plain()

    monkeypatch.setattr(reading, "_heed_nobody", slowly)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        pool = helpers(run, table.files())
        assert pool is not None
        pool.terminate()
        pool.join()
    finally:
        signal.signal(signal.SIGTERM, before)
