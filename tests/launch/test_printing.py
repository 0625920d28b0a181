"""What ranks print: labelled, once where it is the same, in order, and never lost."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx import streams
from phalanx.launch import printing as printing_room
from phalanx.launch.local import run_ranks
from phalanx.launch.printing import SAME_SECONDS, Merged
from tests.test_cli import Done, run_forked


def rank() -> int:
    return int(os.environ["RANK"])


def printing() -> None:
    print("the same everywhere")
    print("to stderr", file=sys.stderr)
    print(f"I am {rank()}")
    time.sleep(0.05 * rank())
    print("late but the same")
    os.write(1, b"from below: gr\xc3")
    time.sleep(0.05)
    os.write(1, b"\xb6\xc3\x9fe\n")
    if rank() == 1:
        print("one of them alone")
    os.system("echo from a child")
    if rank() == 1:
        print("without an end", end="")


def run(program: Callable[[], None], ranks: int, well: bool) -> None:
    printing_room.SAME_SECONDS = 3.0  # on a busy machine ranks are far from each other
    outcome = run_ranks(program, ranks)
    assert (outcome.failures is None) == well, outcome


def told(program: Callable[[], None], ranks: int, cwd: Path, well: bool = True) -> Done:
    """By a process of its own, whose streams are not a test's."""
    done = run_forked(run, program, ranks, well, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done


def warning() -> None:
    time.sleep(0.6 * rank())
    for number in range(2):
        warnings.warn(f"careful\n  with {number}", stacklevel=1)
    print("no warning", file=sys.stderr)


def apart(ranks: int) -> None:
    importlib.reload(warnings)  # as they are without pytest, which keeps them
    printing_room.SAME_SECONDS = 0.1
    assert run_ranks(warning, ranks).failures is None


def test_a_warning_is_told_once_however_late_others_have_it(tmp_path: Path) -> None:
    done = run_forked(apart, 3, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    warned = [line for line in lines if "Warning" in line]
    assert len(warned) == 2, done.stderr
    for number, line in enumerate(warned):
        assert line.startswith(f"[rank 0] {__file__}:")
        assert line.endswith(f": UserWarning: careful with {number}")
    assert len(lines) == 5, "what is no warning is told of each"


def test_lines_are_labelled_or_told_once(tmp_path: Path) -> None:
    done = told(printing, 3, tmp_path)
    assert done.stderr == "to stderr\n"
    lines = done.stdout.splitlines()
    assert sorted(lines) == sorted([
        "the same everywhere", "[rank 0] I am 0", "[rank 1] I am 1", "[rank 2] I am 2", "late but the same",
        "from below: größe", "[rank 1] one of them alone", "from a child", "[rank 1] without an end",
    ])  # fmt: skip
    assert lines[0] == "the same everywhere"


def killed() -> None:
    print("last words of", rank())
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


def raising() -> None:
    print("before it failed")
    raise ValueError("no")


@pytest.mark.parametrize(("program", "words"), [(killed, "[rank 1] last words of 1"), (raising, "before it failed")])
def test_what_was_printed_before_the_end_is_not_lost(program: Callable[[], None], words: str, tmp_path: Path) -> None:
    assert words in told(program, 2, tmp_path, well=False).stdout.splitlines()


def chatty() -> None:
    for number in range(20_000):
        print(f"line {number} of {rank() if number % 2 else 'all'}")


def test_much_is_told_whole_and_in_order(tmp_path: Path) -> None:
    began = time.monotonic()
    lines = told(chatty, 2, tmp_path).stdout.splitlines()
    assert time.monotonic() - began < 30
    for number in (0, 1):
        own = [
            int(line.split()[-3])
            for line in lines
            if line.startswith(f"[rank {number}] ") and line.endswith(f"of {number}")
        ]
        assert own == list(range(1, 20_000, 2))
    counts = [int(line.split()[-3]) for line in lines if line.endswith("of all") and "[rank 1]" not in line]
    assert counts == list(range(0, 20_000, 2))


def outlived() -> None:
    if rank() == 1:
        subprocess.Popen(["sh", "-c", "for _ in $(seq 600); do echo still here; sleep 0.05; done"])


def test_what_outlives_its_rank_and_goes_on_printing_is_not_waited_for(tmp_path: Path) -> None:
    began = time.monotonic()
    assert "[rank 1] still here" in told(outlived, 2, tmp_path).stdout.splitlines()
    assert time.monotonic() - began < 20


def ours() -> None:
    print("ours", file=streams.stdout(), flush=True)
    print("theirs")


def test_our_own_lines_have_no_label_and_one_rank_needs_none(tmp_path: Path) -> None:
    assert sorted(told(ours, 2, tmp_path).stdout.splitlines()) == ["ours", "ours", "theirs"]
    assert sorted(told(ours, 1, tmp_path).stdout.splitlines()) == ["ours", "theirs"]


def test_a_rank_keeps_its_order_and_waits_for_others_only_a_moment() -> None:
    merged = Merged(range(4, 6))
    for number, text in ((4, "a"), (4, "b"), (5, "b"), (5, "a")):
        merged.add(number, 1, text, 0.0)
    assert list(merged.due(0.0)) == []
    assert list(merged.due(SAME_SECONDS + 0.01)) == [(1, "[rank 4] a"), (1, "b"), (1, "[rank 5] a")]
    for text in ("a", "4 alone", "b", "c"):
        merged.add(4, 1, text, 0.0)
    for text in ("a", "5 alone", "5 again", "b", "c"):
        merged.add(5, 1, text, 0.1)
    told = [(1, text) for text in ("a", "[rank 5] 5 alone", "[rank 5] 5 again", "[rank 4] 4 alone", "b", "c")]
    assert list(merged.due(SAME_SECONDS + 0.01)) == told
    merged.add(5, 2, "c", 1.0)
    merged.add(4, 1, "c", 1.0)
    assert sorted(merged.due(2.0)) == [(1, "[rank 4] c"), (2, "[rank 5] c")]
    assert not merged._same


def test_any_number_of_lines_come_between_two() -> None:
    merged = Merged(range(2))
    for text in ("first", "last"):
        merged.add(0, 1, text, 0.0)
    merged.add(1, 1, "first", 0.0)
    for number in range(500):
        merged.add(1, 1, str(number), 0.0)
    merged.add(1, 1, "last", 0.0)
    told = [text for _, text in merged.due(1.0)]
    assert told == ["first", *(f"[rank 1] {number}" for number in range(500)), "last"]
