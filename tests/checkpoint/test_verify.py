"""Checking offline: every byte of a checkpoint counts, and what is wrong is named with its file."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from phalanx import WrongUse
from phalanx.checkpoint.manager import CheckpointManager
from phalanx.checkpoint.manifest import Damaged
from phalanx.checkpoint.store import open_store
from phalanx.checkpoint.verify import verify
from phalanx.cli import main
from phalanx.errors import CannotHere
from phalanx.run import Run
from tests.checkpoints import as_older, contents, exchange_part, newest, rewritten, trained
from tests.ranks import Ranks
from tests.tasks import Digits


def test_whole_checkpoints_hold(ranks: Ranks, tmp_path: Path) -> None:
    run = Run(tmp_path)
    ranks(2, trained, Digits(), "fsdp=2", run.checkpoints_path, None, 1)
    ranks(1, trained, Digits(), "dp=1", run.checkpoints_path, run.checkpoints_path, 1)
    seen: list[tuple[str, int, int]] = []
    verdict = verify(str(tmp_path), lambda *progress: seen.append(progress))
    assert verdict.holds
    assert verdict.exit_code == 0
    assert verdict.summary == "2 of 2 checkpoints are whole"
    assert "written as fsdp=2" in verdict.evidence[0]
    assert seen[-1][:1] == ("step 2",)
    assert seen[-1][1] == seen[-1][2] == newest(run.checkpoints_path).manifest.size
    assert verify(str(run.checkpoints_path)).holds, "the folder itself may be given"


def test_every_byte_counts(tmp_path: Path) -> None:
    """Of every file: headers, which others read, and what lies between; and none may be cut short, or longer."""
    trained(Digits(width=2), "dp=1", tmp_path, None, 1)
    for path in (tmp_path / "step-00000001").iterdir():
        good = path.read_bytes()
        places = range(0, len(good), 97) if path.suffix == ".json" else range(0, len(good), 13)
        for content in (*(good[:p] + bytes([good[p] ^ 4]) + good[p + 1 :] for p in places), good[:-2], good + b"\0\n"):
            path.write_bytes(content)
            verdict = verify(str(tmp_path))
            assert verdict.exit_code == 1
            assert any(path.name in line and "DAMAGED" in line for line in verdict.evidence)
        path.unlink()
        assert f"{path.name} cannot be read: No such file" in str(verify(str(tmp_path)))
        path.write_bytes(good)
    assert verify(str(tmp_path)).holds


@pytest.mark.parametrize("older", [False, True])
def test_a_part_of_another_step_or_run_is_noticed(ranks: Ranks, older: bool, tmp_path: Path) -> None:
    """Each part is whole by itself."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    ranks(2, trained, Digits(), "fsdp=2", here, None, 1)
    ranks(2, trained, Digits(), "fsdp=2", here, here, 1)
    ranks(2, trained, Digits(seed=7), "fsdp=2", elsewhere, None, 2)
    step = here / "step-00000002"
    if older:
        as_older(step)
        assert "was written by an older version, without hashes of its parts" in str(verify(str(here)))
    assert verify(str(here)).holds
    own = {path: path.read_bytes() for path in step.iterdir()}
    for other, words in (
        (here / "step-00000001", "it is of step 1"),
        (elsewhere / "step-00000002", "its seed differs, as in another run or attempt"),
    ):
        exchange_part(step, other)
        told = f"part-00001.json is not the part that step 2 was committed with: {words}"
        assert told in str(verify(str(here)))
        with pytest.raises(Damaged, match=re.escape(told)):
            newest(here).tensor("model/0.weight")
        for path, content in own.items():
            path.write_bytes(content)
    assert verify(str(here)).holds


def test_a_part_with_the_same_facts_is_known_by_its_hash(ranks: Ranks, tmp_path: Path) -> None:
    """As a run of the same settings leaves it, and another moment of the same step."""
    ranks(2, trained, Digits(), "fsdp=2", tmp_path, None, 1)
    part = tmp_path / "step-00000001" / "part-00001.json"
    rewritten(part, lambda found: found["tensors"]["model/0.weight"].update(hash="1"))
    told = "part-00001.json is not the part that step 1 was committed with: it was written again"
    assert told in str(verify(str(tmp_path)))
    as_older(tmp_path / "step-00000001")
    assert "does not say of model/0.weight what its parts say" in str(verify(str(tmp_path)))


def test_a_folder_under_another_steps_name_is_damaged(tmp_path: Path) -> None:
    trained(Digits(), "dp=1", tmp_path, None, 1)
    (tmp_path / "step-00000001").rename(tmp_path / "step-00000009")
    assert "manifest.json is of step 1, and its folder of step 9" in str(verify(str(tmp_path)))


def test_a_whole_checkpoint_of_another_run_is_noticed(tmp_path: Path) -> None:
    """By what the run's events say of its own."""
    run = Run(tmp_path / "run")
    trained(Digits(), "dp=1", run.checkpoints_path, None, 1)
    trained(Digits(seed=7), "dp=1", tmp_path / "other", None, 1)
    found = newest(run.checkpoints_path).manifest.hash()
    run.events_path(0).parent.mkdir()
    events = [
        {"kind": "start", "step": 0}, {"kind": "checkpoint", "step": 1, "hash": "of an attempt that was gone behind"},
        {"kind": "start", "step": 0}, {"kind": "checkpoint", "step": 1, "hash": found},
        {"kind": "checkpoint", "step": 1, "failed": "OSError"},
    ]  # fmt: skip
    run.events_path(0).write_text("".join(json.dumps(event) + "\n" for event in events))
    assert run.committed() == {1: found}
    assert verify(str(run.path)).holds
    shutil.rmtree(run.checkpoints_path)
    shutil.copytree(tmp_path / "other", run.checkpoints_path)
    assert "step-00000001 is not what " in str(verify(str(run.path)))
    assert f"those that the run's events tell of step 1 were {found[:16]}" in str(verify(str(run.path)))


def test_a_hash_that_was_written_wrong_is_noticed(tmp_path: Path) -> None:
    trained(Digits(), "dp=1", tmp_path, None, 1)
    path = tmp_path / "step-00000001" / "manifest.json"
    manifest = newest(tmp_path).manifest
    assert manifest.has_hashes
    manifest.tensors["model/0.weight"].hash += 1
    path.write_bytes(manifest.to_json())
    assert "manifest.json does not say of model/0.weight what its parts say" in str(verify(str(tmp_path)))


def test_what_is_left_and_what_can_be_gone_on_from_is_said(tmp_path: Path) -> None:
    trained(Digits(), "dp=1", tmp_path, None, 1)
    trained(Digits(), "dp=1", tmp_path, tmp_path, 1)
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    (tmp_path / ".writing-00000" / "step-00000003").mkdir(parents=True)
    verdict = verify(str(tmp_path))
    assert verdict.exit_code == 1
    assert verdict.next == "The run can go on from step 1."
    assert any("unfinished: .writing-00000/step-00000003" in line for line in verdict.evidence)
    CheckpointManager(open_store(tmp_path)).set_aside(2)
    verdict = verify(str(tmp_path))
    assert verdict.holds
    assert any("set aside: damaged-step-00000002" in line for line in verdict.evidence)


def test_the_final_weights_must_be_the_last_checkpoints(tmp_path: Path) -> None:
    run = Run(tmp_path)
    trained(Digits(), "dp=1", run.checkpoints_path, None, 1)
    run.weights_path.parent.mkdir()
    found = contents(run.checkpoints_path)
    weights = {name.removeprefix("model/"): t for name, t in found.items() if name.startswith("model/")}
    save_file(weights, run.weights_path)
    assert verify(str(tmp_path)).holds
    run.certificate_path.write_text('{"steps": 1}')
    assert verify(str(tmp_path)).holds
    assert "the weights of the last checkpoint" in str(verify(str(tmp_path)))
    certified = {"steps": 1, "hash": newest(run.checkpoints_path).manifest.hash()}
    run.certificate_path.write_text(json.dumps(certified))
    assert verify(str(tmp_path)).holds
    run.certificate_path.write_text(json.dumps(certified | {"hash": 64 * "1"}))
    assert f"certificate.json: certifies weights {16 * '1'}, and step 1 has" in str(verify(str(tmp_path)))
    run.certificate_path.write_text(json.dumps(certified | {"steps": 9}))
    assert verify(str(tmp_path)).holds, "of a step that is not kept any more: the certificate alone knows its weights"
    run.certificate_path.write_text(json.dumps(certified | {"steps": 9, "hash": 64 * "1"}))
    assert f"and its certificate is of {16 * '1'}" in str(verify(str(tmp_path)))
    run.certificate_path.write_text(json.dumps(certified))
    weights = load_file(run.weights_path)
    weights["2.bias"][1] += 1e-6
    save_file(weights, run.weights_path)
    verdict = verify(str(tmp_path))
    assert verdict.exit_code == 1
    assert "is not what step 1 has: 2.bias differs" in str(verdict)
    run.weights_path.write_bytes(run.weights_path.read_bytes()[:-9])
    assert "model.safetensors" in str(verify(str(tmp_path)))
    assert verify(str(tmp_path)).exit_code == 1


def test_where_nothing_is_there(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="is not there"):
        verify(str(tmp_path / "nowhere"))
    assert verify(str(tmp_path)).exit_code == 1
    assert "there is no checkpoint in" in str(verify(str(tmp_path)))


def test_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    trained(Digits(), "dp=1", tmp_path, None, 1)

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["phalanx", "verify", *words])
        with pytest.raises(SystemExit) as left:
            main()
        return left.value.code, capfd.readouterr().out  # type: ignore[return-value]

    code, out = run(str(tmp_path), "--json")
    assert code == 0
    assert json.loads(out)["holds"] is True
    assert run(str(tmp_path / "nowhere"))[0] == 2
    (tmp_path / "step-00000001" / "part-00000.safetensors").unlink()
    assert run(str(tmp_path))[0] == 1


def test_what_cannot_be_read_is_told_without_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(Digits(), "dp=1", tmp_path, None, 1)
    folder = tmp_path / "step-00000001"
    for name in ("part-00000.safetensors", "part-00000.json", "manifest.json"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        assert f"{name} cannot be read: it is no regular file" in str(verify(str(tmp_path)))

    def fails(path: Path) -> list[str]:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr(os, "listdir", fails)
    with pytest.raises(CannotHere, match=r"cannot be read: Stale file handle\. Mount it"):
        verify(str(tmp_path))
