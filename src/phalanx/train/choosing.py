"""Which run to go on with: the one in a folder, or a task's last, by what each says of itself."""

from __future__ import annotations

import sys
from pathlib import Path

from phalanx.errors import WrongUse
from phalanx.files import exists
from phalanx.run import Run


def to_resume(path: Path | None, task: str | None, config: Path | None) -> tuple[Path, Path | None]:
    """The folder of a run to go on with, the one asked for or a task's last, and its settings if it has begun."""
    if path is None:
        path = _last_run(task)
    run = Run(path)
    if not exists(run.settings_path):
        if task is None and config is None:
            raise WrongUse(f"{path} holds no run to go on with. Give another --run, or name a task to begin one there.")
        return path, config
    trained = run.task()
    if task is not None and not same_task(task, trained):
        raise WrongUse(
            f"{path} is a run of another task, {trained}. Leave {task} out to go on with it, or give another --run."
        )
    return path, config or run.settings_path


def full_reference(task: str) -> str:
    """A task file by its full path, so that the run can be repeated from anywhere; a recipe by its name."""
    file, colon, name = task.partition(":")
    return f"{Path(file).resolve()}{colon}{name}" if file.endswith(".py") else task


def same_task(task: str, trained: str) -> bool:
    """Whether a task as the command line names it is what a run trained; its file may have moved since."""
    file, _, name = full_reference(task).partition(":")
    then, _, its_name = trained.partition(":")
    if name and its_name and name != its_name:
        return False
    return file == then or (Path(file).name == Path(then).name and not exists(Path(then)) and exists(Path(file)))


def _last_run(task: str | None) -> Path:
    """The folder under ``runs/`` whose settings were last written: of a task, or of any."""
    found: list[tuple[float, Path]] = []
    others: list[str] = []
    for settings in Path("runs").glob("*/run.toml"):
        run = Run(settings.parent)
        try:
            trained, written = run.task(), settings.stat().st_mtime
        except (WrongUse, OSError) as error:
            print(f"   note  {run.path} is passed over: {error}", file=sys.stderr)
            continue
        if task is None or same_task(task, trained):
            found.append((written, run.path))
        else:
            others.append(f"{run.path} is of {trained}")
    if not found:
        of, but = (f" of {task}", f"; {others[0]}" if others else "") if task else ("", "")
        raise WrongUse(
            f"there is no run{of} here to go on with{but}. Give its folder with --run, or leave --resume out."
        )
    return max(found)[1]
