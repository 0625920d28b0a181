"""Whether a layout has been proven, as `phalanx train` says it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from phalanx import Layout, user_code
from phalanx.proofs import record, said
from phalanx.references import find_task
from tests.prove.tasks import Plain

TASK = "from dataclasses import dataclass\nimport phalanx\n\n@dataclass\nclass Mine(phalanx.Task):\n    pass\n"
SETTINGS = {"width": 8, "steps": 100}


def leave(folder: Path, **changes: object) -> None:
    results = [{"layout": "dp=2,micro_batch=4", "verdict": "equal"}, {"layout": "fsdp=2", "verdict": "differs"}]
    known = record(Plain, user_code.snapshot(user_code.home(Plain)))
    proof = {**known, "settings": SETTINGS, "results": results, **changes}
    (folder / "prove-1").mkdir(exist_ok=True)
    (folder / "prove-1" / "proof.json").write_text(json.dumps(proof))


def words(folder: Path, layout: str = "dp=2", **settings: object) -> str:
    return said(Plain(), {**SETTINGS, **settings}, Layout.parse(layout), [folder], "plain.py")


def test_a_proof_of_this_code_is_found(tmp_path: Path) -> None:
    assert "phalanx prove plain.py --layouts dp=2" in words(tmp_path)
    leave(tmp_path)
    assert words(tmp_path).startswith("dp=2 trains like one device in float64: ")
    assert words(tmp_path, steps=3).startswith("dp=2 trains like one device in float64: ")
    assert words(tmp_path, width=16).startswith("not proven with width=16, only with width=8")
    bf16 = said(Plain(precision="bf16"), SETTINGS, Layout.parse("dp=2"), [tmp_path], "plain.py")
    assert "bf16 was not tried" in bf16
    assert words(tmp_path, "fsdp=2").startswith("NOT like one device")
    assert words(tmp_path, "fsdp=4").startswith("not proven")


def test_the_command_has_what_was_chosen(tmp_path: Path) -> None:
    from phalanx.recipes.pretrain import Pretrain
    from phalanx.recipes.sft import SFT
    from phalanx.settings import plain_settings

    task = SFT(lora=4, length=64, steps=7)
    told = said(task, plain_settings(task), Layout.parse("dp=2"), [tmp_path], "sft")
    assert told.endswith("; phalanx prove sft --set length=64 --set lora=4 --layouts dp=2")
    told = said(Pretrain(), plain_settings(Pretrain()), Layout.parse("dp=2"), [tmp_path], "pretrain")
    assert told.endswith("; phalanx prove pretrain --layouts dp=2")


def test_other_code_planted_bugs_and_torn_files_do_not_count(tmp_path: Path) -> None:
    for change in ({"files": {"tasks.py": "other"}}, {"phalanx": "other"}, {"inject": "a bug"}, {"class": "Other"}):
        leave(tmp_path, **change)
        assert words(tmp_path).startswith("not proven")
    (tmp_path / "prove-1" / "proof.json").write_text("{")
    assert words(tmp_path).startswith("not proven")


def test_one_device_is_not_said_to_be_unproven(tmp_path: Path) -> None:
    assert words(tmp_path, "dp=1") == ""
    leave(tmp_path, results=[{"layout": "dp=1", "verdict": "differs"}])
    assert words(tmp_path, "dp=1").startswith("NOT like one device")
    leave(tmp_path, results=[{"layout": "dp=1", "verdict": "equal"}])
    assert words(tmp_path, "dp=1").startswith("dp=1 trains like one device")


def test_a_task_of_the_same_name_in_another_file_is_another(tmp_path: Path) -> None:
    results = [{"layout": "dp=2", "verdict": "equal"}]
    found = {}
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text(TASK)
        found[name] = find_task(str(tmp_path / name))
    leave(tmp_path, **record(found["one.py"], user_code.snapshot(tmp_path)), results=results)
    told = {name: said(task(), SETTINGS, Layout(dp=2), [tmp_path], name) for name, task in found.items()}
    assert told["one.py"].startswith("dp=2 trains like one device")
    assert told["two.py"].startswith("not proven")


@pytest.mark.parametrize(
    "content",
    [
        "[]", "3", "null", '"text"', "{}", '{"results": 3}', "\x00\xff", "[" * 100_000, '{"settings": []}',
        '{"class": "Plain", "settings": {}, "results": [3, {}, {"layout": 4}, {"layout": "xp=2", "verdict": "equal"}]}',
    ],
)  # fmt: skip
def test_a_proof_of_another_shape_is_none(content: str, tmp_path: Path) -> None:
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "proof.json").write_bytes(content.encode("latin-1"))
    assert words(tmp_path).startswith("not proven")
    leave(tmp_path)
    assert words(tmp_path).startswith("dp=2 trains like one device")


def test_a_proof_that_is_no_file_is_none(tmp_path: Path) -> None:
    for name in ("folder", "link", "pipe"):
        (tmp_path / name).mkdir()
    (tmp_path / "folder" / "proof.json").mkdir()
    (tmp_path / "link" / "proof.json").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe" / "proof.json")
    leave(tmp_path)
    assert words(tmp_path).startswith("dp=2 trains like one device")


def test_a_layout_of_a_later_version_spoils_no_proof(tmp_path: Path) -> None:
    results = [{"layout": "xp=2", "verdict": "equal"}, {"layout": "dp=2", "verdict": "equal"}]
    leave(tmp_path, results=results)
    assert words(tmp_path).startswith("dp=2 trains like one device")
