"""Documents are true: every command and every Python block in README and docs/ runs."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.launch.place import PLACES
from tests.test_cli import phalanx, run_forked

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("phalanx ")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A reader's folder: the example where the pages say it is."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copy(ROOT / "examples" / "spirals.py", tmp_path)
    return tmp_path


def _shortened(words: list[str]) -> list[str]:
    """What makes a command quick without changing what it does."""
    if {"--config", "--dry-run", "--help"} & set(words) or words[1] != "train":
        return []
    if any(word.partition(":")[0] in PLACES for word in words):  # a cluster's own tests run them there
        return ["--dry-run"]
    small = ["megabytes=0.05", "width=32", "layers=4", "length=32"] if {"gpt", "pretrain", "bert"} & set(words) else []
    if {"pretrain", "bert"} & set(words):
        small += ["vocabulary=300", "cache=cache"]
    killed = next((int(word.partition("@")[2]) for word in words if re.fullmatch(r"\d+@\d+", word)), 1)
    steps = [] if "--steps" in words else ["--steps", str(killed + 2)]
    return steps + [word for setting in small for word in ("--set", setting)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_run(page: Path, folder: Path) -> None:
    for words in commands(page):
        done = phalanx(*words[1:], *_shortened(words), cwd=folder)
        assert done.returncode == int("--inject" in words), f"{shlex.join(words)}\n{done.stderr}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "ray.md"], ids=lambda page: page.name)
def test_python_runs(page: Path, folder: Path) -> None:
    for block in blocks(page, "python"):
        done = run_forked(_execute, block, cwd=folder)
        assert done.returncode == 0, f"{block}\n{done.stderr}"


@pytest.mark.every
def test_python_runs_on_ray(folder: Path) -> None:
    pytest.importorskip("ray", reason="no Ray (pip install 'phalanx[ray]')")
    for block in blocks(ROOT / "docs" / "ray.md", "python"):
        (folder / "block.py").write_text(block)
        done = subprocess.run([sys.executable, "block.py"], cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{block}\n{done.stderr}"


def _execute(block: str) -> None:
    Path("block.py").write_text(block)
    sys.path.insert(0, ".")
    runpy.run_path("block.py")


def test_the_readmes_task_is_the_example() -> None:
    assert blocks(ROOT / "README.md", "python")[0] == (ROOT / "examples" / "spirals.py").read_text()
    assert len([line for line in blocks(ROOT / "README.md", "python")[0].splitlines() if line.strip()]) <= 25


def test_every_claim_on_security_names_tests_that_are_there() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    rows = re.findall(r"^\| (?!claim|---)(.+?) \| (.+?) \|$", page, re.MULTILINE)
    assert len(rows) > 20
    for claim, held_by in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", held_by)
        assert named or claim.startswith("**Not defended**"), claim
        for file, name in named:
            assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file} has no {name}"


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_what_make_train_suggests_runs(folder: Path) -> None:
    suggestions = re.findall(r"\$\(BIN\)/(phalanx train .*?)(?:   |\"|$)", (ROOT / "Makefile").read_text())
    assert len(suggestions) >= 4
    for text in suggestions:
        words = shlex.split(text)
        done = phalanx(*words[1:], *_shortened(words), cwd=folder)
        assert done.returncode == 0, f"{text}\n{done.stderr}"
