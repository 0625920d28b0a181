"""Weights on disk: any safetensors reader reads them, tied ones stand once, and half a file is never there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import phalanx
from phalanx import Layout
from phalanx.checkpoint import weights as module
from phalanx.checkpoint.weights import write_weights
from tests.parity import HostileLanguage, HostileVision
from tests.ranks import Ranks


def save(task: phalanx.Task, layout: str, path: Path) -> dict[str, torch.Tensor]:
    with phalanx.Engine(task, Layout.parse(layout), device="cpu") as engine:
        write_weights(engine.spread, path, writer=engine.environment.rank == 0)
        return engine.whole_weights()


@pytest.mark.parametrize("task", [HostileLanguage(), HostileVision()], ids=["language", "vision"])
def test_a_sharded_model_is_saved_whole(ranks: Ranks, tmp_path: Path, task: phalanx.Task) -> None:
    path = tmp_path / "final" / "model.safetensors"
    expected = ranks(4, save, task, "dp=2,fsdp=2", path)[0]
    found = load_file(path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype
    model = task.model().double()
    with safe_open(path, "pt") as file:
        tied = json.loads(file.metadata()["tied"])
    model.load_state_dict(found | {alias: found[name] for alias, name in tied.items()})
    assert [p.name for p in path.parent.iterdir()] == ["model.safetensors"]


def test_a_write_that_fails_leaves_no_file_that_looks_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tensor: torch.Tensor) -> bytes:
        raise OSError("disk full")

    monkeypatch.setattr(module, "raw_bytes", fail)
    with pytest.raises(OSError, match="disk full"):
        save(HostileVision(), "dp=1", tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()
