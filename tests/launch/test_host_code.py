"""The task's code as it is sent to hosts: what is imported, what lies beside it, under the same paths."""

from __future__ import annotations

import base64
import io
import sys
import tarfile
from pathlib import Path

import pytest

from phalanx import CannotHere
from phalanx.launch import host_code
from phalanx.launch.host_code import PackedCode
from phalanx.launch.place import Command
from phalanx.references import find_task

TASK = "import phalanx\n\n\nclass Mine(phalanx.Task):\n    pass\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a task in a package, with another module that is imported late."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    package = tmp_path / "mine_to_send"
    (package / "inner").mkdir(parents=True)
    for name in ("__init__.py", "inner/__init__.py", "inner/late.py", "data.bin"):
        (package / name).write_text("")
    (package / "task.py").write_text(TASK)
    (tmp_path / "beside.py").write_text("")
    find_task(str(package / "task.py"))
    return tmp_path


def sent(folder: Path, code: PackedCode) -> set[str]:
    """Of this folder's files."""
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(code.packed))) as archive:
        names = {Path("/") / name for name in archive.getnames()}
    return {str(path.relative_to(folder)) for path in names if path.is_relative_to(folder)}


def test_a_package_is_sent_whole(folder: Path) -> None:
    names = {"__init__.py", "task.py", "inner/__init__.py", "inner/late.py"}
    assert sent(folder, PackedCode.here()) == {f"mine_to_send/{name}" for name in names}


def test_a_file_is_sent_with_those_beside_it(folder: Path) -> None:
    (folder / "single.py").write_text(TASK)
    find_task(str(folder / "single.py"))
    assert {"single.py", "beside.py"} <= sent(folder, PackedCode.here())


def test_a_command_is_moved_to_where_the_files_are(folder: Path) -> None:
    code = PackedCode.here()
    words = (f"{folder}/mine_to_send/task.py:Mine", "--checkpoints", "kept", "--init-from", "hf://x", "--steps", "3")
    moved = code.moved(Command("python", words, folder, folder / "run", "run", 30.0), "/cache")
    assert moved.folder == Path(f"/cache{folder}")
    assert moved.words == (
        f"/cache{folder}/mine_to_send/task.py:Mine", "--checkpoints", str(folder / "kept"), "--init-from", "hf://x",
        "--steps", "3",
    )  # fmt: skip
    assert moved.run == folder / "run"
    assert code.moved(Command("python", ("gpt",), folder, folder, "run", 30.0), "/cache").words == ("gpt",)
    variables = code.moved_path({"PYTHONPATH": f"{folder}:/elsewhere", "A": "b"}, "/cache")
    assert variables["A"] == "b"
    *there, own, other = variables["PYTHONPATH"].split(":")
    assert f"/cache{folder}" in there
    assert all(path.startswith("/cache") for path in there)
    assert (own, other) == (str(folder), "/elsewhere")


def test_too_much_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_code, "MOST_BYTES", 10)
    with pytest.raises(CannotHere, match="Put the code into a folder of its own"):
        PackedCode.here()
