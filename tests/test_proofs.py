"""Whether a layout has been proven, as `phalanx train` says it."""

from __future__ import annotations

import json
from pathlib import Path

from phalanx import Layout
from phalanx.proofs import code_hash, said
from tests.prove.tasks import Averaging, Plain

SETTINGS = {"width": 8, "steps": 100}


def leave(folder: Path, **changes: object) -> None:
    results = [{"layout": "dp=2,micro_batch=4", "verdict": "equal"}, {"layout": "fsdp=2", "verdict": "differs"}]
    proof = {"class": "Plain", "code": code_hash(Plain), "settings": SETTINGS, "results": results, **changes}
    (folder / "prove-1").mkdir(exist_ok=True)
    (folder / "prove-1" / "proof.json").write_text(json.dumps(proof))


def words(folder: Path, layout: str = "dp=2", **settings: object) -> str:
    return said(Plain(), {**SETTINGS, **settings}, Layout.parse(layout), folder, "plain.py")


def test_a_proof_of_this_code_is_found(tmp_path: Path) -> None:
    assert "phalanx prove plain.py --layouts dp=2" in words(tmp_path)
    leave(tmp_path)
    assert words(tmp_path).startswith("dp=2 trains like one device in float64: ")
    assert words(tmp_path, steps=3).startswith("dp=2 trains like one device in float64: ")
    assert words(tmp_path, width=16).startswith("not proven with width=16, only with width=8")
    bf16 = said(Plain(precision="bf16"), SETTINGS, Layout.parse("dp=2"), tmp_path, "plain.py")
    assert "bf16 was not tried" in bf16
    assert words(tmp_path, "fsdp=2").startswith("NOT like one device")
    assert words(tmp_path, "fsdp=4").startswith("not proven")


def test_other_code_planted_bugs_and_torn_files_do_not_count(tmp_path: Path) -> None:
    for change in ({"code": "other"}, {"inject": "a bug"}, {"class": "Other"}):
        leave(tmp_path, **change)
        assert words(tmp_path).startswith("not proven")
    (tmp_path / "prove-1" / "proof.json").write_text("{")
    assert words(tmp_path).startswith("not proven")
    assert code_hash(Plain) == code_hash(Averaging)  # they are in one file
