"""What ``--on`` means, and what a run's folder remembers of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx import CannotHere, Run, WrongUse
from phalanx.launch import hosts, place
from phalanx.launch.place import Command, place_of, words_of


def test_this_machine_is_no_place() -> None:
    assert place_of(None) is None
    assert place_of("local:4") is None


def test_values_may_have_commas_and_colons() -> None:
    made = place_of("slurm:nodelist=n[1,3-5],dependency=afterok:1:2,exclusive,nodes=2")
    assert made is not None
    assert getattr(made, "given") == {"nodelist": "n[1,3-5]", "dependency": "afterok:1:2", "exclusive": ""}  # noqa: B009
    assert made.nodes == 2


def test_options_become_words_again() -> None:
    given = {
        "layout": "dp=2", "task": "mine.py", "on": "slurm", "assignments": ["width=3", "name=a b"], "steps": None,
        "exact": True, "resume": False, "save_steps": 5, "run": Path("x"), "log": ["csv", "wandb"],
    }  # fmt: skip
    assert words_of(given, left_out=("on", "run")) == (
        "mine.py", "--layout", "dp=2", "--set", "width=3", "--set", "name=a b", "--exact", "--save-steps", "5",
        "--log", "csv", "--log", "wandb",
    )  # fmt: skip


def test_a_host_runs_the_same_words(tmp_path: Path) -> None:
    command = Command("python", ("gpt", "--exact"), tmp_path, tmp_path / "run", "run", 30.0)
    assert command.on(4) == [
        "python", "-m", "phalanx", "train", "gpt", "--exact", "--run", str(tmp_path / "run"), "--on", "local:4",
        "--resume",
    ]  # fmt: skip


def test_what_a_folder_says_of_its_place_is_read_back(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert place.noted(run) is None
    place.note(run, "slurm:nodes=2,partition=a", "17")
    found = place.noted(run)
    assert found is not None
    assert (found[0].nodes, found[1]) == (2, "17")
    (tmp_path / "place.json").write_text("{")
    with pytest.raises(CannotHere, match="Remove it if the run was not submitted"):
        place.noted(run)


def test_a_place_that_is_not_known_is_named_with_the_nearest() -> None:
    with pytest.raises(WrongUse, match="'slrm' is not a place that is known; did you mean 'slurm'"):
        place_of("slrm:nodes=2")


@pytest.mark.parametrize(("on", "told"), [("", "choose one of"), ("k8s:image=x", "'kubernetes'"), ("SLURM", "'slurm'")])
def test_a_place_that_is_none(on: str, told: str) -> None:
    with pytest.raises(WrongUse, match=f"is not a place that is known; .*{told}"):
        place_of(on)


def test_a_run_that_goes_on_here_is_no_longer_a_place_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    (tmp_path / "hosts").mkdir()
    place.note(run, "hosts:a,b", "1@elsewhere")
    place.taken_back(run)
    assert place.noted(run) is not None  # how it ended is not known, or whether
    (tmp_path / "hosts" / hosts.CODE).write_text("130\n")
    place.taken_back(run)
    assert place.noted(run) is None
    place.note(run, "slurm:nodes=2", "17")
    monkeypatch.setenv("PATH", str(tmp_path))  # without Slurm's tools
    place.taken_back(run)
    assert place.noted(run) is not None
