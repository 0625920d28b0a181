"""LoRA of a run: peft reads it bit for bit, what peft wrote is begun from, and merged it is a model of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tqdm import tqdm

import phalanx
from phalanx import WrongUse
from phalanx.models.lora import is_lora
from phalanx.models.nf4 import dequantised, quantised
from phalanx.recipes.sft import SFT
from phalanx.run import Run
from phalanx.train.exporting import export_run
from tests.checkpoints import contents, trained

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the dev extra has it)")
QUESTION = [{"role": "user", "content": "What is a gene?"}]


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # or its bar leaves a thread behind
    torch.manual_seed(0)
    task = SFT(small=True)
    task.model().save_pretrained(tmp_path / "base")
    task._tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def ran(base: Path, **settings: Any) -> tuple[Run, dict[str, torch.Tensor]]:
    """A run of two steps, and its weights."""
    run = Run(base.parent / "run")
    run.path.mkdir()
    settings = {"base": str(base), "length": 64, "global_batch": 4, "steps": 2, "learning_rate": 0.01} | settings
    run.write_settings({"run": {"task": "sft"}, "settings": settings})
    trained(SFT(**settings), "dp=1", run.checkpoints_path, None, 2)
    saved = contents(run.checkpoints_path)
    return run, {name.removeprefix("model/"): saved[name] for name in saved if name.startswith("model/")}


@pytest.mark.parametrize("kind", ["lora", "dora", "rslora"])
def test_peft_reads_it_and_we_read_peft(base: Path, kind: str) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed (the dev extra has it)")
    settings: dict[str, Any] = {"lora": 3, "lora_alpha": 5, "lora_kind": kind}
    run, weights = ran(base, **settings)
    verdict = export_run(run.path, base.parent / "lora")
    assert "exported step 2 as LoRA" in verdict.summary
    found = load_file(base.parent / "lora" / "adapter_model.safetensors")
    learned = {name: weight for name, weight in weights.items() if is_lora(name)}
    assert found.keys() == {f"base_model.model.{name}" for name in learned}
    assert all(torch.equal(found[f"base_model.model.{name}"], weight) for name, weight in learned.items())

    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    theirs = peft.PeftModel.from_pretrained(plain, base.parent / "lora").eval()
    own = peft.get_peft_model_state_dict(theirs)
    assert own.keys() == found.keys()
    assert all(torch.equal(own[name], weight) for name, weight in found.items())
    theirs.save_pretrained(base.parent / "theirs")
    task = SFT(base=str(base), length=64, steps=1, adapter=str(base.parent / "theirs"), **settings)
    with phalanx.Engine(task, device="cpu") as engine:
        begun = engine.whole_weights()
    assert all(torch.equal(begun[name], weight) for name, weight in weights.items())

    (base / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    export_run(run.path, base.parent / "merged", merge=True)
    assert json.loads((base.parent / "merged" / "generation_config.json").read_text()) == {"eos_token_id": [2, 3]}
    (base.parent / "merged" / "generation_config.json").unlink()
    whole = transformers.AutoModelForCausalLM.from_pretrained(base.parent / "merged").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(base.parent / "merged")
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        assert torch.allclose(whole(**ids).logits, theirs(**ids).logits, atol=1e-4)
        written = whole.generate(**ids, max_new_tokens=3, do_sample=False)
        assert torch.equal(written, theirs.generate(**ids, max_new_tokens=3, do_sample=False))


def test_a_base_in_4_bits_is_merged_as_it_was_trained_beside(base: Path) -> None:
    run, weights = ran(base, lora=3, four_bit=True, precision="bf16", base_dtype="bf16")
    export_run(run.path, base.parent / "merged", merge=True)
    before = transformers.AutoModelForCausalLM.from_pretrained(base).state_dict()
    after = transformers.AutoModelForCausalLM.from_pretrained(base.parent / "merged").state_dict()
    assert {weight.dtype for weight in after.values()} == {torch.bfloat16}
    assert after.keys() == before.keys()
    name = "model.layers.1.mlp.up_proj"
    wide = dequantised(quantised(before[f"{name}.weight"]), before[f"{name}.weight"].shape, torch.float32)
    assert not torch.equal(wide, before[f"{name}.weight"])
    added = 16 / 3 * weights[f"{name}.lora_B.weight"] @ weights[f"{name}.lora_A.weight"]
    assert torch.allclose(after[f"{name}.weight"].float(), wide + added, rtol=2**-8, atol=1e-6)
    assert torch.equal(after["model.norm.weight"], before["model.norm.weight"].bfloat16())


def test_of_a_run_without_lora_nothing_is_merged(base: Path) -> None:
    run, weights = ran(base)
    with pytest.raises(WrongUse, match="has trained no LoRA to merge"):
        export_run(run.path, base.parent / "to", merge=True)
    with pytest.raises(WrongUse, match="Leave --format safetensors out"):
        export_run(run.path, base.parent / "to", format="safetensors", merge=True)
    (base / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    export_run(run.path, base.parent / "to")
    assert json.loads((base.parent / "to" / "generation_config.json").read_text()) == {"eos_token_id": [2, 3]}
    found = transformers.AutoModelForCausalLM.from_pretrained(base.parent / "to").state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    assert (base.parent / "to" / "tokenizer.json").exists()
