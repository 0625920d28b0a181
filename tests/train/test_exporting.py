"""Exporting a run: the right checkpoint in the right form, or a reason that ends in what to do."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

import phalanx
from phalanx import WrongUse
from phalanx.checkpoint.best import Best
from phalanx.recipes.distil import Distil
from phalanx.run import Run
from phalanx.train.exporting import export_run
from tests.checkpoints import as_older, contents, exchange_part, manager_at, trained
from tests.ranks import Ranks
from tests.tasks import Digits

TASKS = Path(__file__).parents[1] / "tasks.py"


@dataclass
class Averaged(Digits):
    """With buffers, and two averages."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, self.width), nn.BatchNorm1d(self.width), nn.Linear(self.width, 3))

    def callbacks(self) -> list[phalanx.Callback]:
        return [phalanx.EMA(0.5), phalanx.EMA(0.9)]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "run")
    run.path.mkdir()
    run.write_settings({"run": {"task": f"{TASKS}:Digits"}, "settings": {"steps": 6}})
    trained(Digits(), "dp=1", run.checkpoints_path, None, 1)
    trained(Digits(), "dp=1", run.checkpoints_path, run.checkpoints_path, 1)
    return run


def test_the_last_checkpoint_or_a_steps(run: Run, tmp_path: Path) -> None:
    verdict = export_run(run.path, tmp_path / "last")
    assert verdict.holds
    assert "exported step 2 as safetensors" in verdict.summary
    assert f"--init-from {tmp_path / 'last'}" in verdict.next
    expected = contents(run.checkpoints_path)
    found = load_file(tmp_path / "last" / "model.safetensors")
    assert all(torch.equal(tensor, expected[f"model/{name}"]) for name, tensor in found.items())
    assert "exported step 1" in export_run(run.path, tmp_path / "first", step=1).summary
    assert not torch.equal(load_file(tmp_path / "first" / "model.safetensors")["0.weight"], found["0.weight"])


def test_the_best_checkpoint(run: Run, tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match=r"no checkpoint as the best.*keep_best"):
        export_run(run.path, tmp_path / "none", best=True)
    manager_at(run.checkpoints_path).note_best(Best(1, "loss", 0.5))
    verdict = export_run(run.path, tmp_path / "last")
    assert "exported step 2" in verdict.summary, "the run has not ended"
    assert "step 1, with the best loss, 0.5, is another: --best exports it" in verdict.evidence
    assert "exported step 1" in export_run(run.path, tmp_path / "best", best=True).summary
    run.certificate_path.parent.mkdir(exist_ok=True)
    run.certificate_path.write_text(json.dumps({"steps": 2, "best": {"step": 1}}))
    assert "exported step 1" in export_run(run.path, tmp_path / "ended").summary, "as it is in final/"
    assert "exported step 2" in export_run(run.path, tmp_path / "asked", step=2).summary
    with pytest.raises(WrongUse, match="--best and --step"):
        export_run(run.path, tmp_path / "both", step=2, best=True)


def test_a_file_for_torch_load(run: Run, tmp_path: Path) -> None:
    """A plain state dict, of any step, without the task's code."""
    (run.path / "run.toml").unlink()
    verdict = export_run(run.path, tmp_path / "to", "pt", step=1)
    assert "exported step 1 for torch.load" in verdict.summary
    found = torch.load(tmp_path / "to" / "model.pt", weights_only=True)
    export_run(run.path, tmp_path / "first", "safetensors", step=1)
    expected = load_file(tmp_path / "first" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    Digits().model().load_state_dict(found)


def test_averages_of_any_step(tmp_path: Path) -> None:
    """Those of a callback, by its name; of what it keeps nothing of, the model's."""
    run = Run(tmp_path / "run")
    task = Averaged()
    trained(task, "dp=1", run.checkpoints_path, None, 2)
    trained(task, "dp=1", run.checkpoints_path, run.checkpoints_path, 2)
    for step in (2, 4):
        saved = manager_at(run.checkpoints_path).open(step)
        for label, name in (("EMA", "ema"), ("EMA-2", "EMA-2")):
            verdict = export_run(run.path, to := tmp_path / f"{label} {step}", "safetensors", step=step, weights=name)
            found = load_file(to / "model.safetensors")
            assert torch.equal(found["0.weight"], saved.tensor(f"callbacks/{label}/0.weight"))
            assert not torch.equal(found["0.weight"], saved.tensor("model/0.weight"))
            assert torch.equal(found["1.running_mean"], saved.tensor("model/1.running_mean"))
            assert f"of 9 weights and buffers are those of {name}; 1.num_batches_tracked, 1.running_mean" in str(
                verdict
            )
    with pytest.raises(WrongUse, match="Choose one of: model, EMA, EMA-2"):
        export_run(run.path, tmp_path / "to", "pt", weights="ema-3")
    export_run(run.path, tmp_path / "pt", "pt", weights="ema")
    found = torch.load(tmp_path / "pt" / "model.pt", weights_only=True)
    assert torch.equal(found["0.weight"], saved.tensor("callbacks/EMA/0.weight"))


def test_a_part_of_another_step_or_a_checkpoint_of_another_run_is_not_exported(
    ranks: Ranks, run: Run, tmp_path: Path
) -> None:
    here = run.checkpoints_path
    ranks(2, trained, Digits(), "fsdp=2", here, here, 1)
    ranks(2, trained, Digits(), "fsdp=2", here, here, 1)
    exchange_part(here / "step-00000004", here / "step-00000003")
    with pytest.raises(WrongUse, match=r"part-00001\.json is not the part that step 4 was committed with.*--step"):
        export_run(run.path, tmp_path / "to")
    run.events_path(0).parent.mkdir()
    run.events_path(0).write_text('{"kind": "checkpoint", "step": 3, "hash": "another"}\n')
    with pytest.raises(WrongUse, match=r"step-00000003 is not what .* has saved.*--step"):
        export_run(run.path, tmp_path / "to", step=3)
    run.events_path(0).unlink()
    as_older(here / "step-00000003")
    told = export_run(run.path, tmp_path / "to", step=3)
    assert "was written by an older version, without hashes of its parts" in str(told)


def test_what_cannot_be_is_refused(run: Run, tmp_path: Path) -> None:
    for words, options in (
        ("--format gguf is not known. Choose one of: safetensors, pt, hf", {"format": "gguf"}),
        ("--merge writes a Hugging Face folder. Leave --format pt out", {"format": "pt", "merge": True}),
        ("step 2 has no weights 'ema': a callback of that name keeps none. Choose one of: model", {"weights": "ema"}),
        ("is not one of Hugging Face's. Use --format safetensors", {"format": "hf"}),
        ("there is no checkpoint of step 7. Choose one of: 1, 2", {"step": 7}),
    ):
        with pytest.raises(WrongUse, match=words):
            export_run(run.path, tmp_path / "to", **options)
    with pytest.raises(WrongUse, match="is not there"):
        export_run(tmp_path / "nowhere", tmp_path / "to")
    part = run.checkpoints_path / "step-00000002" / "part-00000.safetensors"
    part.write_bytes(part.read_bytes()[:-900])
    with pytest.raises(WrongUse, match=r"part-00000\.safetensors is too short to hold .*--step"):
        export_run(run.path, tmp_path / "to")
    (run.checkpoints_path / "step-00000002" / "manifest.json").unlink()
    with pytest.raises(WrongUse, match=r"manifest\.json cannot be read.*--step"):
        export_run(run.path, tmp_path / "to")
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("lora", [0, 2])
def test_a_students_folder_names_its_own_dtype(lora: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of a teacher, which is larger and narrow."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # or its bar leaves a thread behind
    config = Distil()._teachers
    config.hidden_size, config.head_dim, config.dtype = 4 * config.hidden_size, 4 * config.head_dim, torch.bfloat16
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "teacher")
    settings = {"teacher": str(tmp_path / "teacher"), "precision": "bf16", "lora": lora, "steps": 1}
    run = Run(tmp_path / "run")
    run.path.mkdir()
    run.write_settings({"run": {"task": "distil"}, "settings": settings})
    trained(Distil(**settings), "dp=1", run.checkpoints_path, None, 1)
    export_run(run.path, to := tmp_path / "to", merge=bool(lora))
    found = load_file(to / "model.safetensors")
    assert not any(name.startswith("teacher.") for name in found)
    assert {tensor.dtype for tensor in found.values()} == {torch.float32} == {AutoConfig.from_pretrained(to).dtype}
