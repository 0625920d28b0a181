"""Another user's run.toml does not choose what is run as the caller; one's own does, with a line if it must."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx import WrongUse
from phalanx.run import Run
from phalanx.train import trusted
from phalanx.train.evaluating import Evaluator
from phalanx.train.exporting import export_run
from phalanx.train.resolving import resolve
from phalanx.train.trusted import file_of, owner, task_of
from tests.checkpoints import trained
from tests.tasks import Digits

OTHER = 54321
TASK = Path(__file__).parents[1] / "tasks.py"
REFUSED = "belongs to the user of number 54321 and names .*mine.py, which belongs to the user of number 54321"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run whose task tells when it is imported."""
    code = tmp_path / "mine.py"
    code.write_text(
        f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\nfrom tests.tasks import Digits\n"
    )
    run = Run(tmp_path / "run")
    run.path.mkdir()
    settings = {"run": {"task": f"{code}:Digits", "folder": str(tmp_path)}, "settings": {"steps": 6}}
    run.write_settings(settings)
    trained(Digits(), "dp=1", run.checkpoints_path, None, 1)
    return run


@needs_root
def test_another_users_run_names_no_code_to_run(run: Run, tmp_path: Path) -> None:
    for path in (run.settings_path, tmp_path / "mine.py"):
        os.chown(path, OTHER, -1)
    options = {"task": None, "layout": None, "on": None, "assignments": [], "steps": None, "device": "cpu"}
    for reads in (
        lambda: export_run(run.path, tmp_path / "to"),
        lambda: Evaluator.of(run.path),
        lambda: resolve(**options, config=run.settings_path, resume=True),
    ):
        with pytest.raises(WrongUse, match=REFUSED):
            reads()
    assert not (tmp_path / "ran").exists()
    with pytest.raises(WrongUse, match="or --format safetensors, which needs none of it"):
        export_run(run.path, tmp_path / "to")
    for format in ("safetensors", "pt"):
        assert export_run(run.path, tmp_path / format, format).holds
    assert not (tmp_path / "ran").exists()
    resolve(**options | {"task": f"{TASK}:Digits"}, config=run.settings_path)
    assert not (tmp_path / "ran").exists(), "the caller has named the code"
    assert Evaluator.of(run.path, trust=True).chosen() == 1
    assert (tmp_path / "ran").exists()
    assert resolve(**options, config=run.settings_path, resume=True, trust=True)
    assert export_run(run.path, tmp_path / "to", trust=True).holds


@needs_root
def test_code_of_others_in_ones_own_run_is_told(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert task_of(run.settings_path, run.settings()["run"], False) is Digits
    assert not capsys.readouterr().err
    os.chown(tmp_path / "mine.py", OTHER, -1)
    assert task_of(run.settings_path, run.settings()["run"], False) is Digits
    assert f"runs {tmp_path / 'mine.py'}, which belongs to the user of number 54321" in capsys.readouterr().err


@needs_root
def test_ones_own_code_in_another_users_run_is_run(run: Run) -> None:
    os.chown(run.settings_path, OTHER, -1)
    assert task_of(run.settings_path, run.settings()["run"], False) is Digits
    assert task_of(run.settings_path, {"task": "gpt"}, False).__name__ == "GPT", "a recipe is nobody else's"


def test_whose_a_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert owner(tmp_path / "file") == owner(tmp_path / "nowhere") == ""
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    assert owner(Path("/")) == "", "what root has put there"


def test_which_file_a_word_names(tmp_path: Path) -> None:
    assert file_of("gpt", None) is None
    assert file_of("a/b.py:C", None) == Path("a/b.py")
    (tmp_path / "module.py").touch()
    (tmp_path / "package").mkdir()
    assert file_of("module:C", str(tmp_path)) == tmp_path / "module.py"
    assert file_of("package.inner", str(tmp_path)) == tmp_path / "package"
    assert file_of("numpy", str(tmp_path)) is None, "it is installed"


def test_a_folder_of_another_users_is_looked_at_where_imports_are(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes first on the path: a module of ours would import theirs from there."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    monkeypatch.setattr(trusted, "owner", lambda path: "the user x" if path in (theirs, run.settings_path) else "")
    ran = {"task": "phalanx.recipes.gpt:GPT", "folder": str(theirs)}
    with pytest.raises(WrongUse, match="theirs, which belongs to the user x"):
        trusted.task_of(run.settings_path, ran, False)
    assert trusted.task_of(run.settings_path, ran | {"folder": str(tmp_path)}, False).__name__ == "GPT"
