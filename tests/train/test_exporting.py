"""Exporting a run: the right checkpoint in the right form, or a reason that ends in what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from phalanx import WrongUse
from phalanx.recipes.distil import Distil
from phalanx.run import Run
from phalanx.train.exporting import export_run
from tests.checkpoints import contents, trained
from tests.tasks import Digits

TASKS = Path(__file__).parents[1] / "tasks.py"


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


def test_what_cannot_be_is_refused(run: Run, tmp_path: Path) -> None:
    for words, options in (
        ("--format gguf is not known. Choose safetensors or hf", {"format": "gguf"}),
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
