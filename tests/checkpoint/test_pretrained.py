"""Beginning from saved weights: every rank reads its part, and what does not fit is named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM

import phalanx
from phalanx import Layout, WrongUse
from phalanx.checkpoint.pretrained import Pretrained
from phalanx.checkpoint.weights import write_weights
from tests.hugging_face import CausalLanguageModel, config
from tests.parity import HostileVision
from tests.ranks import Ranks


@dataclass
class FineTuning(CausalLanguageModel):
    folder: str = ""

    def pretrained(self) -> str:
        return self.folder


def weights(task: phalanx.Task, layout: str) -> dict[str, Tensor]:
    with phalanx.Engine(task, Layout.parse(layout), device="cpu") as engine:
        return {name: tensor.clone() for name, tensor in engine.whole_weights().items()}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_a_saved_model_is_read_in_parts(
    ranks: Ranks, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # or its bar leaves a thread behind
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config(kind))
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    expected = dict(model.named_parameters())
    layouts = ["fsdp=2,tp=2", "tp=2,pp=2", *(["fsdp=4,ep=4"] if kind == "mixtral" else [])]
    for layout in layouts:
        found = ranks(4, weights, FineTuning(kind=kind, folder=str(tmp_path), precision="fp32"), layout)[0]
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), f"{layout}: {name}"


@dataclass
class Again(HostileVision):
    folder: str = ""

    def pretrained(self) -> str | None:
        return self.folder or None


def trained(folder: str) -> None:
    with phalanx.Engine(Again(), Layout(dp=2), device="cpu") as engine:
        for batch in engine.batches():
            engine.step(batch)
        write_weights(engine.spread, Path(folder) / "model.safetensors", writer=engine.environment.rank == 0)


def test_buffers_are_read_too(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, trained, str(tmp_path))
    saved = load_file(tmp_path / "model.safetensors")
    assert any("running_mean" in name for name in saved)
    for found in ranks(2, weights, Again(folder=str(tmp_path)), "pp=2"):
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())


def test_what_the_model_has_no_place_for_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"a": torch.zeros(2), "b": torch.zeros(3)}, tmp_path / "a.safetensors")
    Pretrained(tmp_path, {"a": torch.Size([2])}, {})
    assert f"note  {tmp_path}: the model has no place for some of its tensors (b)" in capsys.readouterr().err
    save_file({"a": torch.zeros(2), "lm_head.weight": torch.zeros(3)}, tmp_path / "a.safetensors")
    Pretrained(tmp_path, {"a": torch.Size([2])}, {})
    assert "what the saved model ends in is not used (lm_head.weight)" in capsys.readouterr().err


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    shapes = {"body.weight": torch.Size([3, 2])}
    with pytest.raises(WrongUse, match=r"there is no \.safetensors file"):
        Pretrained(tmp_path, shapes, {})
    save_file({"body.weights": torch.zeros(3, 2)}, tmp_path / "a.safetensors")
    with pytest.raises(WrongUse, match=r"has no body\.weight; did you mean 'body\.weights'"):
        Pretrained(tmp_path, shapes, {})
    save_file({"body.weight": torch.zeros(3, 3)}, tmp_path / "a.safetensors")
    with pytest.raises(WrongUse, match=r"body\.weight has shape \(3, 3\) .* and \(3, 2\) in the model"):
        Pretrained(tmp_path, shapes, {})
    (tmp_path / "a.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:-5])
    with pytest.raises(WrongUse, match="is not a whole safetensors file"):
        Pretrained(tmp_path, shapes, {})


def test_a_body_may_have_been_saved_without_its_head(tmp_path: Path) -> None:
    save_file({"layers.0.weight": torch.arange(6.0).view(3, 2)}, tmp_path / "a.safetensors")
    found = Pretrained(tmp_path, {"model.layers.0.weight": torch.Size([3, 2])}, {})
    assert torch.equal(found.part("model.layers.0.weight", None, 0), torch.arange(6.0).view(3, 2))


def test_what_could_be_meant_in_two_ways_is_refused(tmp_path: Path) -> None:
    shapes, dtypes = {"a": torch.Size([2])}, {"a": torch.float32}
    for dtype, words in ((torch.int64, "whole"), (torch.bool, "whole"), (torch.complex64, "complex")):
        save_file({"a": torch.ones(2).to(dtype)}, tmp_path / "one.safetensors")
        with pytest.raises(WrongUse, match=f"a holds {words} numbers in .*, and a of the model real ones"):
            Pretrained(tmp_path, shapes, {}, dtypes)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        save_file({"a": torch.ones(2).to(dtype)}, tmp_path / "one.safetensors")
        Pretrained(tmp_path, shapes, {}, dtypes)
    with pytest.raises(WrongUse, match=r"a holds real numbers in .*, and a of the model whole ones"):
        Pretrained(tmp_path, shapes, {}, {"a": torch.int64})
    save_file({"a": torch.zeros(2)}, tmp_path / "two.safetensors")
    with pytest.raises(WrongUse, match=r"a is in one\.safetensors and in two\.safetensors of .*, and which is meant"):
        Pretrained(tmp_path, shapes, {}, dtypes)
