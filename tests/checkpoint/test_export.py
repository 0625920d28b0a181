"""Weights for others: bit for bit what the checkpoint has, in files that others read, or nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

import phalanx
from phalanx import Layout, WrongUse
from phalanx.checkpoint.export import export
from phalanx.checkpoint.frozen import beginnings
from phalanx.checkpoint.manager import Checkpoint
from phalanx.checkpoint.manifest import Damaged
from phalanx.errors import CannotHere
from phalanx.parallel.weights.blueprint import Blueprint
from tests.checkpoints import contents, newest, trained
from tests.hugging_face import CausalLanguageModel, config
from tests.parity import HostileLanguage
from tests.ranks import Ranks


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {n.removeprefix("model/"): t for n, t in contents(folder).items() if n.startswith("model/")}


def made(folder: Path) -> Checkpoint:
    """A new checkpoint, of which the frozen weights are to be had too."""
    task = HostileLanguage()
    trained(task, "dp=1", folder, None, 1)
    found = newest(folder)
    return replace(found, began=beginnings(Blueprint(task.model, task.seed), None, task, found.manifest))


@pytest.mark.parametrize("shard_bytes", [1 << 30, 1 << 10], ids=["one file", "several"])
def test_safetensors(shard_bytes: int, tmp_path: Path) -> None:
    checkpoint = made(tmp_path / "run")
    seen: list[tuple[int, int]] = []
    to = tmp_path / "to"
    files = export(checkpoint, to, progress=lambda *p: seen.append(p), shard_bytes=shard_bytes)
    assert files == sorted(to.iterdir())
    frozen = {name: checkpoint.tensor(f"model/{name}") for name in checkpoint.manifest.frozen}
    assert frozen, "a norm, which is made again"
    expected = weights(tmp_path / "run") | frozen
    found: dict[str, torch.Tensor] = {}
    for file in to.glob("*.safetensors"):
        found |= load_file(file)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert seen[-1][0] == seen[-1][1]
    with safe_open(next(to.glob("*.safetensors")), "pt") as file:
        assert json.loads(file.metadata()["tied"]) == {"head.weight": "embedding.weight"}
    if shard_bytes == 1 << 10:
        index = json.loads((to / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == expected.keys()
        assert all(name in load_file(to / file) for name, file in index["weight_map"].items())
    else:
        assert [file.name for file in files] == ["model.safetensors"]


def test_a_state_dict(tmp_path: Path) -> None:
    """Shared weights are there under both names, and frozen ones: a model takes it as it is."""
    checkpoint = made(tmp_path / "run")
    seen: list[tuple[int, int]] = []
    assert export(checkpoint, tmp_path / "to", progress=lambda *p: seen.append(p), pt=True) == [
        tmp_path / "to" / "model.pt"
    ]
    assert seen[-1][0] == seen[-1][1]
    found = torch.load(tmp_path / "to" / "model.pt", weights_only=True)
    expected = weights(tmp_path / "run")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert found["head.weight"].data_ptr() == found["embedding.weight"].data_ptr()
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in found.values())
    HostileLanguage().model().load_state_dict(found)


def begun(task: phalanx.Task, layout: str, folder: str) -> dict[str, torch.Tensor]:
    with phalanx.Engine(task, Layout.parse(layout), device="cpu", init_from=folder) as engine:
        return {name: tensor.clone() for name, tensor in engine.whole_weights().items()}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2", "qwen3", "mixtral"])
def test_hugging_face_reads_it_and_so_do_we(
    ranks: Ranks, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # or its bar leaves a thread behind
    task = CausalLanguageModel(kind=kind, precision="fp32")
    ranks(2, trained, task, "fsdp=2", tmp_path / "run", None, 1)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    to = tmp_path / "to"
    export(newest(tmp_path / "run"), to, config(kind), tmp_path / "source", shard_bytes=40_000)
    assert (to / "tokenizer.json").exists()
    assert AutoConfig.from_pretrained(to).dtype == torch.float32
    model, told = AutoModelForCausalLM.from_pretrained(to, output_loading_info=True)
    assert not any(told[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected, found = weights(tmp_path / "run"), dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype == tensor.dtype
    for layout in ("fsdp=2", "tp=2"):
        for rank in ranks(2, begun, task, layout, str(to)):
            assert all(torch.equal(rank[name], tensor) for name, tensor in expected.items()), layout


def test_nothing_is_written_over(tmp_path: Path) -> None:
    checkpoint = made(tmp_path / "run")
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "mine").touch()
    (tmp_path / "file").touch()
    for name in ("to", "file"):
        with pytest.raises(WrongUse, match=f"{name} is there and not an empty folder"):
            export(checkpoint, tmp_path / name)
    (tmp_path / "to" / "mine").unlink()
    (tmp_path / "to.unfinished").mkdir()
    (tmp_path / "to.unfinished" / "mine").touch()
    (tmp_path / "link").symlink_to(tmp_path / "to")
    export(checkpoint, tmp_path / "link")
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["model.safetensors"]
    assert (tmp_path / "to").stat().st_mode == (tmp_path / "to.unfinished").stat().st_mode, (
        "as any folder, to be shared"
    )
    assert (tmp_path / "to.unfinished" / "mine").exists(), "somebody else's, whatever its name"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "run", "to", "to.unfinished"]


def test_what_is_damaged_or_does_not_fit_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = made(tmp_path / "run")

    def full(descriptor: int) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(CannotHere, match="to cannot be written: No space left on device"):
            export(checkpoint, tmp_path / "to")
    part = tmp_path / "run" / "step-00000001" / "part-00000.safetensors"
    chunk = checkpoint.holding()["model/embedding.weight"].chunks[0]
    content = bytearray(part.read_bytes())
    content[chunk.start] ^= 1
    part.write_bytes(content)
    with pytest.raises(Damaged, match=r"part-00000\.safetensors has changed .* of model/embedding\.weight"):
        export(checkpoint, tmp_path / "to")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
