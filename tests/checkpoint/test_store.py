"""Where checkpoints are kept: whole or not there, on disk and behind a URL."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from phalanx import WrongUse
from phalanx.checkpoint.store import Folder, Remote, Store, open_store


@pytest.fixture(params=["folder", "file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    urls = {"folder": str(tmp_path / "a"), "file": f"file://{tmp_path}/a", "memory": "memory://store-test"}
    yield open_store(urls[request.param])
    if request.param == "memory":
        fsspec.filesystem("memory").rm("/store-test", recursive=True)


def put(store: Store, name: str, content: bytes) -> None:
    with store.write(name) as file:
        file.write(content)


def test_files_and_folders(store: Store) -> None:
    assert store.names() == []
    store.make("a")
    put(store, "a/b/one", b"12345")
    assert "b" in store.names("a")
    assert store.names("a/b") == ["one"]
    assert store.read("a/b/one") == b"12345"
    assert store.read("a/b/one", 1, 3) == b"23"
    assert store.size("a/b/one") == 5
    assert store.exists("a/b/one")
    assert not store.exists("a/b/two")
    with pytest.raises(OSError, match="two"):
        store.read("a/b/two")
    store.rename("a/b", "c")
    assert store.read("c/one") == b"12345"
    assert "b" not in store.names("a")
    store.remove("c")
    assert not store.exists("c/one")
    assert store.names("c") == []
    store.remove("c")


def test_a_commit_is_into_a_free_name(tmp_path: Path) -> None:
    store = Folder(tmp_path)
    for content in (b"first", b"second"):
        store.make("unfinished")
        put(store, "unfinished/new/part", content)
        if content == b"first":
            store.commit("unfinished/new", "done", "last", b"!")
        else:
            with pytest.raises(OSError, match="done"):
                store.commit("unfinished/new", "done", "last", b"?")
    assert store.read("done/part") == b"first"
    assert store.read("done/last") == b"!"


def test_what_a_store_is_not_known_to_do_is_said() -> None:
    store = Remote("memory://x")
    assert store.warning() == ""
    store.url = "gs://x"
    assert "gs:// is not known to create an object only where there is none" in store.warning()


def test_a_file_that_fails_on_the_way_is_not_there(tmp_path: Path) -> None:
    store = Folder(tmp_path)
    put(store, "a", b"good")

    def fails() -> None:
        with store.write("a") as file:
            file.write(b"bad")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert store.read("a") == b"good"
    assert store.names() == ["a"]


def test_nothing_is_written_where_the_folder_above_was_taken_away(tmp_path: Path) -> None:
    store = Folder(tmp_path)
    with pytest.raises(FileNotFoundError):
        put(store, "gone/step/part", b"")
    assert store.names() == []


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with Folder(tmp_path / "a").held():
        with pytest.raises(WrongUse, match=r"is being trained by process \d+ on"), Folder(tmp_path / "a").held():
            pass
        with Folder(tmp_path / "b").held():
            pass
    with Folder(tmp_path / "a").held():
        pass


def test_free_space_is_told_before_the_folder_is_there(tmp_path: Path) -> None:
    assert (Folder(tmp_path / "not" / "there").free() or 0) > 0
    assert Remote("memory://x").free() is None


def test_a_url_that_nothing_opens_is_refused() -> None:
    with pytest.raises(WrongUse, match="nonsense://a cannot be opened"):
        open_store("nonsense://a")


def test_only_regular_files_of_its_own_are_opened(tmp_path: Path) -> None:
    """Reading a FIFO would wait for ever, and a link may lead anywhere."""
    (tmp_path / "secret").write_text("secret")
    store = Folder(tmp_path / "store")
    store.make("a")
    put(store, "a/real", b"12345")
    folder = tmp_path / "store" / "a"
    os.mkfifo(folder / "fifo")
    (folder / "device").symlink_to("/dev/zero")
    (folder / "out").symlink_to(tmp_path / "secret")
    (folder / "beside").symlink_to("real")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(folder / "socket"))
        for name, words in (
            ("fifo", "no regular file"), ("socket", "no regular file"), ("../a", "no regular file"),
            ("device", "leads out"), ("out", "leads out"), ("../../secret", "leads out"),
        ):  # fmt: skip
            for look in (store.read, store.size):
                with pytest.raises(OSError, match=words):
                    look(f"a/{name}")
    with pytest.raises(OSError, match="leads out"):
        store.read("/etc/passwd")
    assert store.read("a/beside") == b"12345"
    assert store.read("a/real", 3, 1 << 62) == b"45", "and no more memory is asked for than there are bytes"
