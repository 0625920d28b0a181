"""Output: whatever happens to it, the program goes on."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from phalanx.watch.output import OutputStream


@pytest.fixture
def descriptor() -> int:
    """One that a test may put anything behind."""
    return os.open(os.devnull, os.O_WRONLY)


def test_a_full_disk_is_remembered(descriptor: int) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, descriptor)
    os.close(full)
    stream = OutputStream(descriptor, open(os.devnull))  # noqa: SIM115
    print("words", file=stream, flush=True)
    assert stream.lost() == "No space left on device"
    stream.before.close()
    os.close(descriptor)


def test_a_reader_that_left_is_no_loss(descriptor: int) -> None:
    reading, writing = os.pipe()
    os.dup2(writing, descriptor)
    os.close(writing)
    stream = OutputStream(descriptor, open(os.devnull))  # noqa: SIM115
    print("one", file=stream, flush=True)
    assert os.read(reading, 10) == b"one\n"
    os.close(reading)
    for _ in range(3):
        print("two", file=stream, flush=True)
    assert stream.lost() == ""
    stream.before.close()
    os.close(descriptor)


def test_a_descriptor_that_does_not_block_is_waited_for(descriptor: int) -> None:
    reading, writing = os.pipe()
    os.dup2(writing, descriptor)
    os.close(writing)
    os.set_blocking(descriptor, False)
    stream = OutputStream(descriptor, open(os.devnull))  # noqa: SIM115
    text, read = "x" * (1 << 18), bytearray()

    def reader() -> None:
        while len(read) < len(text):
            read.extend(os.read(reading, 1 << 14))

    thread = threading.Thread(target=reader)
    thread.start()
    print(text, end="", file=stream, flush=True)
    thread.join()
    assert bytes(read).decode() == text
    assert stream.lost() == ""
    stream.before.close()
    os.close(reading)
    os.close(descriptor)


def test_a_stream_that_was_closed_writes_nowhere(descriptor: int, tmp_path: Path) -> None:
    os.close(descriptor)
    stream = OutputStream(descriptor, None)
    print("größe \udce9", file=stream, flush=True)
    assert stream.lost() == ""
    os.close(descriptor)
