"""Which run is gone on with: a task's own last, and never another's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx import Run, WrongUse
from phalanx.train.choosing import full_reference, same_task, to_resume


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("gpt.py", "gpt-2.py"):
        Path(name).touch()
    return tmp_path


def leave(name: str, task: str, age: float = 0.0) -> Path:
    run = Run(Path("runs") / name)
    run.path.mkdir(parents=True)
    run.write_settings({"run": {"task": full_reference(task)}})
    os.utime(run.settings_path, (1e9 - age, 1e9 - age))
    return run.path


def test_a_run_of_a_task_with_a_longer_name_is_not_taken_up(here: Path) -> None:
    other = leave("gpt-2-001", "gpt-2.py")
    with pytest.raises(WrongUse, match=r"no run of gpt\.py here to go on with; runs/gpt-2-001 is of .*gpt-2\.py"):
        to_resume(None, "gpt.py", None)
    mine = leave("gpt-001", "gpt.py", age=10)
    assert to_resume(None, "gpt.py", None) == (mine, mine / "run.toml")
    assert to_resume(None, "gpt-2.py", None)[0] == other
    assert to_resume(None, None, None)[0] == other, "the newest of all"


def test_a_recipe_and_a_file_of_that_name_are_two_tasks(here: Path) -> None:
    leave("gpt-001", "gpt")
    with pytest.raises(WrongUse, match="is of gpt"):
        to_resume(None, "gpt.py", None)
    assert to_resume(None, "gpt", None)[0].name == "gpt-001"


def test_a_folder_with_another_tasks_run_is_refused(here: Path) -> None:
    path = leave("any name", "gpt-2.py")
    with pytest.raises(WrongUse, match="is a run of another task"):
        to_resume(path, "gpt.py", None)
    assert to_resume(path, "./gpt-2.py", None)[0] == path
    assert to_resume(path, str(here / "gpt-2.py") + ":GPT", None)[0] == path
    assert to_resume(here / "new", "gpt.py", None) == (here / "new", None), "a run that has not begun"


def test_a_file_that_has_moved_is_the_same_task(here: Path) -> None:
    path = leave("gpt-001", "gpt.py")
    (here / "moved").mkdir()
    assert not same_task("moved/gpt.py", Run(path).task()), "both could be there"
    Path("gpt.py").rename("moved/gpt.py")
    assert same_task("moved/gpt.py", Run(path).task())
    assert not same_task("moved/gpt.py:B", Run(path).task() + ":A")


@pytest.mark.parametrize("content", ["", "[run]\n", "[run]\ntask = 3\n", "run = 3\n", "\x00", "["])
def test_a_run_that_does_not_say_what_it_is_is_passed_over(
    here: Path, content: str, capfd: pytest.CaptureFixture[str]
) -> None:
    mine = leave("gpt-001", "gpt.py", age=10)
    torn = leave("gpt-002", "gpt.py")
    (torn / "run.toml").write_text(content)
    assert to_resume(None, "gpt.py", None)[0] == mine
    assert "runs/gpt-002 is passed over: " in capfd.readouterr().err
    with pytest.raises(WrongUse):
        to_resume(torn, "gpt.py", None)


def test_odd_things_beside_runs_are_no_runs(here: Path) -> None:
    mine = leave("gpt-001", "gpt.py")
    Path("runs/file").touch()
    Path("runs/folder/run.toml").mkdir(parents=True)
    Path("runs/link").symlink_to("nowhere")
    Path("runs/dangling").mkdir()
    Path("runs/dangling/run.toml").symlink_to("nowhere")
    Path("runs/pipe").mkdir()
    os.mkfifo("runs/pipe/run.toml")
    assert to_resume(None, None, None)[0] == mine
