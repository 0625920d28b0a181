"""What ``--on`` means, and what a run's folder remembers of it."""

from __future__ import annotations

import json
import os
import shlex
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


@pytest.mark.parametrize(
    ("on", "job"),
    [
        ("kubernetes:image=x", "--kubeconfig=/shared/evil.yaml"), ("kubernetes:image=x", "a b"),
        ("kubernetes:image=x", "-f"), ("kubernetes:image=x", "a/b"), ("kubernetes:image=x", "A"),
        ("kubernetes:image=x", ""), ("kubernetes:image=x", "a,b=c"), ("kubernetes:image=x", "a" * 64),
        ("kubernetes:image=x,namespace=--kubeconfig=/evil", "job"), ("kubernetes:namespace=../x", "job"),
        ("kubernetes:image=x,kind=pods", "job"), ("kubernetes:image=x,context=other", "job"),
        ("slurm", "--me"), ("slurm", "1,2"), ("slurm", "12 --me"), ("slurm", "1_2"), ("slurm", "١٢"), ("slurm", "-1"),
        ("slurm:chdir=/x", "12"), ("ray", "../../x"), ("ray", "1/../2"), ("ray", "."),
        ("hosts:n1", "1@"), ("hosts:n1", "-1@n1"), ("hosts:n1", "1@-n1"), ("hosts:n1", "1@n1 x"), ("hosts:n1", "x@n1"),
        ("hosts:n1", "1" * 20 + "@n1"), ("local:2", "1"), ("", ""), ("nowhere", "1"), ("slurm:\x1b[2J", "12"),
        ("slurm:a=b\nc", "12"),
    ],
)  # fmt: skip
def test_what_a_folder_says_of_its_place_is_held_to_its_form(tmp_path: Path, on: str, job: str) -> None:
    place.note(Run(tmp_path), on, job)
    with pytest.raises(CannotHere, match=r"place\.json .*Remove it if the run was not submitted"):
        place.noted(Run(tmp_path))


@pytest.mark.parametrize(
    "said",
    [
        [], "slurm", 12, None, {"on": "slurm"}, {"job": "12"}, {"on": ["slurm"], "job": "12"},
        {"on": "slurm", "job": 12}, {"on": "slurm", "job": {}}, {"on": "slurm", "job": "12", "x": "x" * 100_000},
    ],
)  # fmt: skip
def test_what_a_folder_says_of_its_place_has_its_fields(tmp_path: Path, said: object) -> None:
    (tmp_path / "place.json").write_text(json.dumps(said))
    with pytest.raises(CannotHere, match=r"place\.json .*Remove it if the run was not submitted"):
        place.noted(Run(tmp_path))


def test_reading_a_place_asks_for_nothing_outside_of_the_folder(tmp_path: Path) -> None:
    """A list of hosts is a file that may be anything; and a pipe would be waited for."""
    run = Run(tmp_path / "run")
    run.path.mkdir()
    (tmp_path / "list").write_text("secret of somebody's\n")
    place.note(run, f"hosts:{tmp_path}/list,ssh=/shared/evil", "12@n1")
    found = place.noted(run)
    assert found is not None
    assert "secret" not in found[0].text
    (run.path / "place.json").unlink()
    os.mkfifo(run.path / "place.json")
    with pytest.raises(CannotHere, match="is a pipe"):
        place.noted(run)


def test_a_command_to_copy_is_quoted(tmp_path: Path) -> None:
    run = Run(tmp_path / "$(touch x)")
    run.path.mkdir()
    place.note(run, "hosts:n1,ssh=ssh;touch y", "12@n1")
    found = place.noted(run)
    assert found is not None
    words = shlex.split(found[0].again(run))
    assert words[words.index("--run") + 1] == str(run.path)
    assert words[words.index("--on") + 1] == "hosts:n1,ssh=ssh;touch y"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to have another user's file")
def test_what_another_user_says_of_jobs_is_not_acted_on(tmp_path: Path) -> None:
    run = Run(tmp_path)
    place.note(run, "slurm", "12")
    place.check_own(run, "scancel 12")
    os.chown(tmp_path / "place.json", 54321, -1)
    with pytest.raises(CannotHere, match=r"belongs to user 54321: .* end it yourself: scancel 12$"):
        place.check_own(run, "scancel 12")
    assert place.said_by(run) == "user 54321"


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
