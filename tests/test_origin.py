"""What a run is made of is in its folder, a year later too: source, git, versions, settings, and no secret."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from phalanx import Run, Task, origin
from phalanx.redact import redact_source
from tests.test_cli import phalanx

TASK = """
from dataclasses import dataclass, field
import torch
from torch import nn
import phalanx
from parts.layers import WIDTH

api_key = "sk-0123456789abcdef"
URL = "https://me:hunter22@host/data"


@dataclass
class Mine(phalanx.Task):
    global_batch: int = 4
    steps: int = 2
    clip: float = float("inf")
    options: dict = field(default_factory=lambda: {"depth": [1, 2], "token": "hf_secret"})

    def model(self): return nn.Linear(WIDTH, 2)
    def data(self):
        import late
        return phalanx.data.Arrays(x=torch.arange(36.0).reshape(12, 3), y=torch.arange(12) % 2)
    def inputs(self, batch): return batch["x"]
    def held_out(self): return phalanx.data.Arrays(x=torch.full((3, WIDTH), 7.0), y=torch.arange(3) % 2)
    def evaluate(self, output, batch):
        import last
        return {"loss": self.loss(output, batch)}
    def loss(self, output, batch): return phalanx.losses.cross_entropy(output, batch["y"])
"""
SECRETS = ("sk-0123456789abcdef", "hunter22", "hf_secret", "from_the_environment")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files = {"mine.py": TASK, "parts/__init__.py": "", "parts/layers.py": "WIDTH = 3\n", "late.py": "", "last.py": ""}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("SOME_SERVICE", "from_the_environment")
    return tmp_path


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def everything_in(folder: Path) -> str:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != Path(__file__).name)
    texts = [path.read_bytes() for path in files]  # but this one, which is code of the user's here
    return b"\n".join(texts).decode(errors="replace")


def test_source_git_versions_and_settings_are_kept_without_secrets(project: Path) -> None:
    git(project, "init", "-q")
    git(project, "add", "mine.py", "parts")
    git(project, "commit", "-qm", "first")
    (project / "parts" / "layers.py").write_text('WIDTH = 3  # edited\npassword = "hunter22"\n')
    done = phalanx("train", "mine.py", "--run", "r", cwd=project)
    assert done.returncode == 0, done.stderr
    kept = project / "r" / "origin" / "001"
    told = json.loads((kept / "origin.json").read_text())
    assert told["git"]["commit"] == git(project, "rev-parse", "HEAD")
    assert told["git"]["changed"]
    assert "+WIDTH = 3  # edited" in (kept / "git.diff").read_text()
    assert told["packages"]["torch"]
    assert told["python"]
    copies = {entry["module"]: entry["copy"] for entry in told["files"].values()}
    for module in ("parts", "parts.layers", "late", "last"):
        assert (kept / "source" / copies[module]).is_file(), module
    assert copies["parts.layers"] == "parts/layers.py"
    assert "class Mine(phalanx.Task)" in (kept / "source" / "mine.py").read_text()
    assert (kept / "run.toml").read_text() == (project / "r" / "run.toml").read_text()
    found = everything_in(project / "r")
    for secret in SECRETS:
        assert secret not in found, secret
    assert json.loads((project / "r" / "checkpoints" / "step-00000002" / "manifest.json").read_text())


def test_an_attempt_that_changed_nothing_leaves_nothing_and_one_that_did_leaves_its_own(project: Path) -> None:
    again = ("train", "--resume", "--run", "r", "--set", 'options={"a": 1}')
    assert phalanx("train", "mine.py", "--run", "r", "--set", 'options={"a": 1}', cwd=project).returncode == 0
    (project / "r" / "final" / "certificate.json").unlink()
    done = phalanx(*again, cwd=project)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in sorted((project / "r" / "origin").iterdir())] == ["001"]
    (project / "parts" / "layers.py").write_text("WIDTH = 3\n# edited\n")
    assert phalanx(*again, "--steps", "3", cwd=project).returncode == 0
    assert [path.name for path in sorted((project / "r" / "origin").iterdir())] == ["001", "002"]
    assert "edited" in (project / "r" / "origin" / "002" / "source" / "parts" / "layers.py").read_text()
    assert "edited" not in (project / "r" / "origin" / "001" / "source" / "parts" / "layers.py").read_text()


def test_what_is_kept_can_be_run(project: Path) -> None:
    assert phalanx("train", "mine.py", "--run", "r", "--set", "options={}", cwd=project).returncode == 0
    shutil.move(project / "r" / "origin" / "001", project / "kept")
    for name in ("mine.py", "late.py", "last.py", "parts"):
        path = project / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    done = phalanx("train", "kept/source/mine.py", "--set", "options={}", "--run", "again", cwd=project)
    assert done.returncode == 0, done.stderr
    first, second = (
        json.loads((project / name / "final" / "certificate.json").read_text())["hash"] for name in ("r", "again")
    )
    assert first == second


def test_what_is_too_much_is_listed_and_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "MOST_OF_A_FILE", 100)
    found = origin.Origin(Run.create(tmp_path / "r", "x"), Task())
    found.write()
    assert found.folder is not None
    told = json.loads((found.folder / "origin.json").read_text())["files"][__file__]
    assert told["copy"] is None
    assert told["bytes"] == Path(__file__).stat().st_size


def test_what_a_killed_attempt_left_is_not_taken_for_whole(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "r", "x")
    left = run.path / "origin" / "001.unfinished"
    left.mkdir(parents=True)
    (left / "origin.json").write_text("{}")
    found = origin.Origin(run, Task())
    found.write()
    assert found.folder == run.path / "origin" / "001"


def test_a_full_disk_keeps_nothing_of_it_and_is_said(small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run.create(small_disk / "disk" / "r", "x")
    ballast = small_disk / "disk" / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(ballast.parent).free - (64 << 10)))
    with origin.kept_origin(run, Task()):  # every test file is a module of this process, far more than 64 KiB
        assert shutil.disk_usage(ballast.parent).free == 64 << 10
    assert list((run.path / "origin").iterdir()) == []
    assert f"cannot be written to {run.path / 'origin'}: [Errno 28]" in capsys.readouterr().err


def test_a_git_that_takes_too_long_is_not_called_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = tmp_path / "git"
    git.write_text("#!/bin/sh\ncase $1 in diff) exec sleep 60;; *) echo here;; esac\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(origin, "GIT_SECONDS", 0.5)
    told, diff = origin._git(tmp_path)
    assert told is not None
    assert (told["changed"], diff) == (None, "")


@pytest.mark.parametrize(
    "line",
    [
        'api_key = "abcdefgh"', "HF_TOKEN='abcdefgh'", '{"password": "abcdefgh"}', 'login(token="abcdefgh")',
        'config["secret_key"] = "abcdefgh"', 'api_key: str = "abcdefgh"', "export AWS_SECRET=abcdefgh",
        'login("hf_abcdefghabcdefghabcdefgh")',
    ],
)  # fmt: skip
def test_secrets_in_source_are_hidden(line: str) -> None:
    assert "abcdefgh" not in redact_source(line)


@pytest.mark.parametrize(
    "line", ['tokens = batch["tokens"]', "token_count = 3", 'key = "width"', 'x = {"a": "abcdefgh"}']
)
def test_what_is_no_secret_stays(line: str) -> None:
    assert redact_source(line) == line
