"""``phalanx new``: every file is short, tidy, and trains as it is."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.cli_new import TEMPLATES, kinds, written
from phalanx.errors import WrongUse
from tests.test_cli import phalanx

LINES = 80
SMALL = dict.fromkeys(
    ("pretrain", "bert"), ("width=32", "length=32", "vocabulary=300", "megabytes=0.05", "cache=cache")
)
RUFF = shutil.which("ruff") or str(Path(sys.executable).with_name("ruff"))


@pytest.mark.parametrize("kind", kinds())
def test_it_trains_as_it_is_written(kind: str, tmp_path: Path) -> None:
    made = phalanx("new", kind, "deep_one", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert made.stdout == "deep_one.py is written. Train it: phalanx train deep_one.py\n"
    words = [word for setting in SMALL.get(kind, ()) for word in ("--set", setting)]
    done = phalanx("train", "deep_one.py", "--steps", "3", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "DeepOne" in (tmp_path / "deep_one.py").read_text()
    assert "3 steps" in done.stdout


@pytest.mark.skipif(not Path(RUFF).exists(), reason="ruff is not installed (the dev extra has it)")
def test_they_are_short_and_tidy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in TEMPLATES.glob("*.py.txt"):
        kind = path.name.removesuffix(".py.txt")
        text = path.read_text()
        assert len(text.splitlines()) < LINES
        for stem, own in (("my_task", "MyTask"), ("one", "One")):
            Path(f"{kind}_{stem}.py").write_text(text.replace("my_task", stem).replace("MyTask", own))
    for words in (("check",), ("format", "--check")):
        done = subprocess.run([RUFF, *words, "--isolated", "."], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_there_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert written("task", "deep/mine.py") == Path("deep/mine.py")
    before = Path("deep/mine.py").read_text()
    assert "class Mine(phalanx.Task):" in before
    with pytest.raises(WrongUse, match="is there already"):
        written("sft", "deep/mine")
    assert Path("deep/mine.py").read_text() == before


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("stf", "mine", "Did you mean sft[?]"),
        (
            "segmentation",
            "mine",
            "no recipe 'segmentation' .* Write a task of your own, .*: phalanx new task mine",
        ),
        ("detection", "mine", "Write a task of your own"),
        ("gpt", "mine", "Did you mean pretrain[?] Or write a task of your own"),
        ("task", "my-task", "is no name of a Python file"),
        ("task", "class", "is no name of a Python file"),
        ("task", "torch", "is the name of a module"),
        ("task", "json", "is the name of a module"),
    ],
)
def test_what_cannot_be_is_refused(
    kind: str, name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WrongUse, match=words):
        written(kind, name)
    assert not list(tmp_path.iterdir())
