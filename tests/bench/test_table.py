"""The table: of all that are installed, with what is missing named, as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.bench import table
from phalanx.bench.contenders import Contender
from phalanx.errors import CannotHere, WrongUse
from tests.test_cli import phalanx

SMALL = ["--layers", "2", "--width", "64", "--length", "16", "--batch", "1", "--vocabulary", "96"]


def test_one_command_measures_and_names_what_is_missing(tmp_path: Path) -> None:
    done = phalanx("bench", "--device", "cpu", "--only", "phalanx", "--only", "torch", *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Phalanx, its own transformer" in done.stdout
    assert "a plain loop in torch" in done.stdout
    assert "ours to it" in done.stdout


def test_json_is_one_object_and_nothing_else(tmp_path: Path) -> None:
    done = phalanx("bench", "--device", "cpu", "--only", "torch", "--json", *SMALL, cwd=tmp_path)
    found = json.loads(done.stdout)
    assert found["shape"]["width"] == 64
    assert found["contenders"]["torch"]["tokens_per_s"] > 0
    assert found["missing"] == {}


def test_who_is_not_installed_or_dies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "CONTENDERS", {
        "absent": Contender("Absent", lambda setting: iter(()), ("nobody_has_this",)),
        "unknown": Contender("Unknown to the process that measures", lambda setting: iter(())),
    })  # fmt: skip
    found = table.bench(table.setting_of("cpu", None), (), lambda text: None)
    assert found.missing["absent"] == "not installed. pip install nobody_has_this"
    assert found.missing["unknown"] == "does not run here: KeyError: 'unknown'"
    assert not found.found


def test_ratios_are_ours_to_each() -> None:
    told = {"ms": 1.0, "gib": 1.0, "first_step_s": 1.0}
    found = table.Comparison(table.setting_of("cpu", "fp8"), "a machine", {
        "phalanx": {"tokens_per_s": 300.0, **told}, "torchtitan": {"tokens_per_s": 200.0, **told},
    })  # fmt: skip
    lines = str(found).splitlines()
    assert lines[1] == "peers train in bf16"
    assert [line.split()[-1] for line in lines if "GiB" in line] == ["1.00", "1.50"]


@pytest.mark.parametrize(("given", "told"), [
    (("tpu", None), "Choose cpu or cuda"), (("cpu", "fp64"), "fp64 is not measured"),
])  # fmt: skip
def test_settings_that_cannot_be_are_refused(given: tuple[str, str | None], told: str) -> None:
    with pytest.raises(WrongUse, match=told):
        table.setting_of(*given)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table.torch.cuda, "is_available", lambda: False)
    with pytest.raises(CannotHere, match="Use --device cpu"):
        table.setting_of("cuda", None)


def test_offload_is_refused_where_there_is_one_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CannotHere, match="Leave it out"):
        table.setting_of("cpu", None, offload=100)
    with pytest.raises(WrongUse, match="from 1 to 100"):
        table.setting_of("cpu", None, offload=101)
    monkeypatch.setattr(table, "CONTENDERS", {"plain": Contender("Plain", lambda setting: iter(()))})
    setting = table.Setting(table.Shape.default("cpu"), "cpu", "fp32", offload=100)
    assert "on the host" in table.bench(setting, (), lambda text: None).missing["plain"]


def test_a_contender_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    done = phalanx("bench", "--device", "cpu", "--only", "torchtitn", cwd=tmp_path)
    assert done.returncode == 2
    assert "torchtitan" in done.stderr
