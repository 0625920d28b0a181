"""Small files: whole, and on disk before they have their names."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from phalanx import Run
from phalanx.files import json_object, no_room, pauses, when_there_is_room, write_whole
from tests.damage import ODD, written
from tests.forking import fork


def test_a_small_file_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, done = Run.create(tmp_path / "one", "x"), []

    def noted(name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            which = os.readlink(f"/proc/self/fd/{args[0]}") if isinstance(args[0], int) else args[0]
            done.append((name, Path(which).name))
            return real(*args, **kwargs)

        return call

    monkeypatch.setattr(os, "fsync", noted("fsync", os.fsync))
    monkeypatch.setattr(os, "replace", noted("rename", os.replace))
    for write, name in (
        (lambda: write_whole(run.path / "a", "text"), "a"),
        (lambda: run.next_generation(), "generation"),
        (lambda: run.write_settings({}), "run.toml"),
    ):
        done.clear()
        write()
        (first, written), (second, renamed), last = done
        assert (first, second, last) == ("fsync", "rename", ("fsync", "one"))
        assert written == renamed
        assert re.fullmatch(rf"{name}\.\w+\.unfinished", written)


def _write_often(path: Path, text: str) -> None:
    for _ in range(100):
        write_whole(path, text)


@pytest.mark.parametrize("name", ODD)
def test_what_is_no_object_is_a_value_error(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(written(name))
    with pytest.raises(ValueError, match=r"^.{1,200}$"):
        json_object(tmp_path / "file")
    (tmp_path / "file").write_text('{"a": [1]}')
    assert json_object(tmp_path / "file") == {"a": [1]}


def test_several_may_write_at_once(tmp_path: Path) -> None:
    texts = [str(number) * 1000 for number in range(4)]
    writers = [fork(_write_often, tmp_path / "a", text) for text in texts]
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert (tmp_path / "a").read_text() in texts
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_matters_is_written_as_soon_as_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    full = iter([True, True, False])

    def write() -> None:
        with open("/dev/full" if next(full) else tmp_path / "a", "w") as file:
            file.write("text")

    when_there_is_room(tmp_path / "a", write)
    assert (tmp_path / "a").read_text() == "text"
    said = capsys.readouterr().err
    assert said.count("waiting for room") == said.count("could be written at last") == 1
    assert slept == [0.25, 0.5]
    assert max(pause for pause, _ in zip(pauses(), range(20), strict=False)) == 30
    assert not no_room(PermissionError())
