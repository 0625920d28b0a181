"""Files of a folder that others may write to: no link is followed, no pipe waited for, nothing large read."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from phalanx import folder_files
from phalanx.errors import WrongUse
from phalanx.files import write_whole
from phalanx.folder_files import (
    BadFile,
    another_user,
    appending,
    count,
    is_file,
    is_folder,
    left_out,
    make_folder,
    names,
    note,
    open_file,
    overwriting,
    read_bytes,
    read_object,
    read_text,
)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder with a file, beside the one that is looked at."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("theirs")
    (tmp_path / "run").mkdir()
    return tmp_path / "outside"


@pytest.fixture
def run(outside: Path) -> Path:
    return outside.parent / "run"


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_files, "_noted", set())


def bad(folder: Path, name: str, kind: str, outside: Path) -> str:
    """Something that is no file of the folder's, and what is said of it."""
    path = folder / name
    match kind:
        case "link":
            path.symlink_to(outside / "file")
            return "is a link, which is not followed"
        case "link to nothing":
            path.symlink_to(outside / "nothing")
            return "is a link, which is not followed"
        case "pipe":
            os.mkfifo(path)
            return "is a pipe and not a file"
        case "socket":
            with socket.socket(socket.AF_UNIX) as sock:
                sock.bind(str(path))
            return "is a socket and not a file"
        case "folder":
            path.mkdir()
            return "is a folder and not a file"
    raise AssertionError(kind)


KINDS = ("link", "link to nothing", "pipe", "socket", "folder")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_neither_read_nor_written(run: Path, outside: Path, kind: str) -> None:
    said = bad(run, "x", kind, outside)
    for use in (read_bytes, read_text, read_object, lambda a, b: open_file(a, b, os.O_WRONLY | os.O_CREAT)):
        with pytest.raises(BadFile, match=f"run/x {said}. Remove it"):
            use(run, run / "x")
    for write in (appending, overwriting):
        with pytest.raises(BadFile, match=said), write(run, run / "x"):
            pass
    assert sorted(path.name for path in outside.iterdir()) == ["file"]
    assert (outside / "file").read_text() == "theirs"


def test_a_folder_that_is_a_link_is_not_gone_through(run: Path, outside: Path) -> None:
    (run / "away").symlink_to(outside)
    with pytest.raises(BadFile, match="run/away is a link"):
        read_bytes(run, run / "away" / "file")
    with pytest.raises(BadFile, match="run/away is a link"):
        names(run, run / "away")
    with pytest.raises(BadFile, match="run/away is a link"):
        make_folder(run, run / "away" / "inner")
    with pytest.raises(BadFile, match="run/away is a link"), appending(run, run / "away" / "file"):
        pass
    with pytest.raises(BadFile, match="run/away is a link"):
        write_whole(run / "away" / "file", "mine", within=run)
    assert [path.name for path in outside.iterdir()] == ["file"]
    (run / "flat").write_text("")
    with pytest.raises(BadFile, match="run/flat is no folder"):
        read_bytes(run, run / "flat" / "file")


def test_a_folder_may_itself_be_reached_by_a_link(run: Path, outside: Path) -> None:
    (run.parent / "latest").symlink_to(outside)
    assert read_text(run.parent / "latest", run.parent / "latest" / "file") == "theirs"


def test_files_are_made_and_written(run: Path) -> None:
    make_folder(run, run / "a" / "b")
    make_folder(run, run / "a" / "b")
    for text in (b"1", b"2"):
        with appending(run, run / "a" / "b" / "c") as file:
            file.write(text)
    assert read_bytes(run, run / "a" / "b" / "c") == b"12"
    with overwriting(run, run / "a" / "b" / "c") as file:
        file.write(b"3")
    assert read_text(run, run / "a" / "b" / "c") == "3"
    assert (run / "a" / "b" / "c").stat().st_mode & 0o137 == 0
    assert os.get_blocking(open_file(run, run / "a" / "b" / "c"))
    with pytest.raises(FileNotFoundError, match="nothing"):
        read_bytes(run, run / "a" / "nothing")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_bytes(run, run / "nowhere" / "nothing")


def test_no_more_is_read_than_fits(run: Path) -> None:
    (run / "x").write_bytes(b"x" * 1000)
    assert read_bytes(run, run / "x", 1000) == b"x" * 1000
    with pytest.raises(BadFile, match="has 1000 B, where 999 B is the most that is read"):
        read_bytes(run, run / "x", 999)
    with (run / "huge").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(BadFile, match=r"has 1.0 TiB, where 1 MiB is the most"):
        read_bytes(run, run / "huge")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is not valid JSON"),
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ('{"a": ' * 100_000, "is not valid JSON"),
        ("9" * 5000, "is not valid JSON"),
        ("[1]", "holds a list where a JSON object is expected"),
        ('"text"', "holds a text where"),
        ("12", "holds a number where"),
        ("true", "holds true or false where"),
        ("null", "holds null where"),
    ],
)
def test_what_is_no_object_is_said_to_be_none(run: Path, content: str, said: str) -> None:
    (run / "x.json").write_text(content)
    with pytest.raises(BadFile, match=f"x.json {said}"):
        read_object(run, run / "x.json")


@pytest.mark.parametrize("value", [None, True, -1, 1.5, "3", [3], 1 << 60, float("inf")])
def test_a_number_is_a_whole_one(value: object) -> None:
    with pytest.raises(BadFile, match=r"steps=.*, where a whole number is expected"):
        count({"steps": value}, "steps", Path("x"))
    assert count({"steps": 3}, "steps", Path("x")) == 3


def test_a_folder_is_listed_up_to_a_number(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(folder_files, "MOST_NAMES", 5)
    for number in range(4):
        (run / f"{number}").write_text("")
    (run / "folder").mkdir()
    assert names(run, run) == ["0", "1", "2", "3", "folder"]
    assert names(run, run, is_folder) == ["folder"]
    assert names(run, run / "nothing") == []
    assert capsys.readouterr().err == ""
    (run / "link").symlink_to("0")
    assert len(names(run, run)) == 5
    assert "has more than 5 entries: the others are not looked at" in capsys.readouterr().err
    monkeypatch.setattr(folder_files, "MOST_NAMES", 6)
    assert names(run, run, is_file) == ["0", "1", "2", "3"]


def test_what_is_left_out_is_said_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(run / "pipe")
    for _ in range(3):
        with left_out():
            read_bytes(run, run / "pipe")
        with left_out():
            read_bytes(run, run / "nothing")
    assert capsys.readouterr().err == f"   note  {run}/pipe is a pipe and not a file: it is left out\n"
    for number in range(100):
        note(f"line {number}\x1b[2J")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == folder_files.MOST_NOTES
    assert said[0] == "   note  line 0\\x1b[2J"
    assert said[-1] == "   note  more is left out, and not told"


def test_whose_a_file_is(run: Path) -> None:
    (run / "x").write_text("")
    assert another_user(run / "x") == ""
    assert another_user(run / "nothing") == ""
    if os.geteuid() == 0:
        os.chown(run / "x", 54321, -1)
        assert another_user(run / "x") == "user 54321"


def test_it_is_a_wrong_use() -> None:
    assert issubclass(BadFile, WrongUse)
