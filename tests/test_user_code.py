"""Which code is the user's, and whether it is what it was."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from phalanx import user_code
from phalanx.recipes import gpt
from tests.prove.tasks import Plain
from tests.test_cli import main, run_forked

TASK = """
from dataclasses import dataclass
import torch
from torch import nn
import phalanx
from helpers.scale import FACTOR


@dataclass
class Mine(phalanx.Task):
    global_batch: int = 4
    steps: int = 2

    def model(self):
        from late import WIDTH

        return nn.Linear(WIDTH, 2)

    def data(self):
        return phalanx.data.Arrays(x=torch.randn(12, 3), y=torch.arange(12) % 2)

    def inputs(self, batch):
        return batch["x"] * FACTOR

    def loss(self, output, batch):
        import later

        return phalanx.losses.cross_entropy(output * later.ONE, batch["y"])
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {
        "task/mine.py": TASK, "task/beside.py": "", "task/late.py": "WIDTH = 3\n", "task/later.py": "ONE = 1\n",
        "lib/helpers/__init__.py": "", "lib/helpers/scale.py": "FACTOR = 1.0\n", "lib/helpers/unused.py": "",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def phalanx(project: Path, *words: str) -> str:
    done = run_forked(_with_library, *words, cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _with_library(*words: str) -> None:
    sys.path.insert(0, str(Path.cwd() / "lib"))
    main(*words)


def test_a_proof_is_void_when_an_imported_file_changes_and_only_then(project: Path) -> None:
    def told() -> str:
        lines = phalanx(project, "train", "task/mine.py", "--layout", "dp=2", "--steps", "1").splitlines()
        return next(line for line in lines if line.startswith("  proof  "))

    assert "not proven" in told()
    phalanx(project, "prove", "task/mine.py", "--layouts", "dp=2", "--steps", "2")
    assert "dp=2 trains like one device" in told()
    for unrelated in ("task/beside.py", "task/new.py", "lib/helpers/unused.py"):
        (project / unrelated).write_text("print('something else')\n")
    (project / "task" / ".#mine.py").symlink_to("me@here.4711:1")
    os.mkfifo(project / "task" / "pipe.py")
    assert "dp=2 trains like one device" in told()
    for used in ("lib/helpers/scale.py", "task/late.py", "task/later.py", "lib/helpers/__init__.py"):
        before = (project / used).read_text()
        (project / used).write_text(before + "# edited\n")
        assert "not proven for this code" in told(), used
        (project / used).write_text(before)
    assert "dp=2 trains like one device" in told()


def test_what_is_the_users(tmp_path: Path) -> None:
    for file in (os.__file__, pytest.__file__, user_code.__file__, sys.executable, "<string>", "<frozen os>", ""):
        assert not user_code.is_users(file), file
    assert user_code.is_users(__file__)
    assert user_code.is_users(str(tmp_path / "x.py"))
    assert user_code.modules()[__name__] == Path(__file__).resolve()
    assert user_code.file_of(Plain) == Path(__file__).parent / "prove" / "tasks.py"
    assert user_code.file_of(dict) is None


def test_whose_lines_are_shown() -> None:
    for file in (__file__, gpt.__file__, "<ipython-input-3-abc>"):
        assert user_code.is_users_line(file), file
    strangers = (user_code.__file__, torch.__file__, np.__file__, pickle.__file__, "<string>", "<frozen importlib>")
    for file in strangers:
        assert not user_code.is_users_line(file), file


def test_what_runs_is_what_was_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "edited_while_it_runs.py"
    file.write_text("ONE = 1\n")
    module = importlib.import_module(file.stem)
    known = user_code.snapshot(tmp_path)
    file.write_text("ONE = 2\n")
    os.utime(file, (1e9, 1e9))
    assert user_code.snapshot(tmp_path) == known
    assert user_code.changed(known, tmp_path) == []
    importlib.reload(module)
    assert user_code.changed(known, tmp_path) == [file.name]
    monkeypatch.delitem(sys.modules, file.stem)


def test_the_line_of_the_users_that_is_nearest_to_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "reads_what_is_not_there.py").write_text(
        "from pathlib import Path\n\n\ndef read():\n    return Path('nowhere').read_text()\n"
    )
    with pytest.raises(FileNotFoundError) as raised:
        importlib.import_module("reads_what_is_not_there").read()
    frame = user_code.innermost(raised.value.__traceback__)
    assert frame is not None
    assert (Path(frame.filename).name, frame.lineno) == ("reads_what_is_not_there.py", 5)
    monkeypatch.delitem(sys.modules, "reads_what_is_not_there")
    monkeypatch.chdir(tmp_path)
    assert user_code.place(frame.filename, frame.lineno) == "reads_what_is_not_there.py:5"
