"""Weights & Biases, offline: its files as its own messages, and one run there for all attempts here."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.watch.loggers.runs import STEPS, TASK, losses, patiently, trained

pytest.importorskip("wandb", reason="wandb is not installed (the dev extra has it)")

OFFLINE = "import os\nos.environ |= {'WANDB_MODE': 'offline', 'WANDB_SILENT': 'true', 'WANDB_PROJECT': 'mine'}"
BLOCK = 1 << 15


def messages(path: Path) -> Iterator[Any]:
    """The records of a file of W&B's: a log of blocks, as LevelDB has them, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if BLOCK - place % BLOCK < 7:
            place += BLOCK - place % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part of one
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def test_each_step_is_in_one_run_once(tmp_path: Path) -> None:
    run = trained(tmp_path, "wandb", more=OFFLINE, phalanx=patiently)
    files = sorted((run.path / "logs" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) >= 2, "each attempt writes a file"
    assert {file.stem for file in files} == {f"run-{(run.path / 'logs' / 'wandb-run').read_text().strip()}"}
    steps: dict[int, float] = {}
    measured: set[int] = set()
    projects, settings = set(), {}
    for file in files:
        own: list[int] = []
        for record in messages(file):
            if record.WhichOneof("record_type") == "run":
                projects.add((record.run.project, record.run.display_name))
                settings |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.WhichOneof("record_type") == "history":
                row = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
                if "train/loss" in row:
                    own.append(row["_step"])
                    steps[row["_step"]] = row["train/loss"]
                    assert {"train/accuracy", "train/some/first x", "train/loss/right", "train/lr"} <= row.keys()
                measured |= {row["_step"]} if "held_out/loss" in row else set()
        assert own == sorted(set(own)), "a step that came again"
    assert own == [11, 12, 13], "what was ended well before is not written again"
    assert projects == {("mine", "run")}
    assert settings["global_batch"] == 8
    assert "topsecret" not in str(settings)
    everything = b"".join(path.read_bytes() for path in run.path.rglob("*") if path.is_file())
    assert b"topsecret" not in everything, "the command line that resumed it had the secret"
    assert b"task.py" not in b"".join(file.read_bytes() for file in files), "nor is the program recorded"
    assert measured == {5, 10, STEPS}
    assert sorted(steps) == list(range(1, STEPS + 1))
    assert [steps[step] for step in sorted(steps)] == pytest.approx(losses(run), rel=1e-5)


def test_who_is_not_logged_in_is_told_what_to_do(tmp_path: Path) -> None:
    nobody = f"import os\nos.environ.pop('WANDB_MODE', None)\nos.environ['HOME'] = {str(tmp_path)!r}"
    nobody += "\nos.environ['WANDB_BASE_URL'] = 'http://127.0.0.1:9'"
    (tmp_path / "task.py").write_text(TASK.format(more=nobody, methods=""))
    done = patiently("train", "task.py", "--log", "wandb", "--run", "run", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "Log in with `wandb login`, or set WANDB_MODE=offline." in done.stderr
