"""What recipes that tune a model have in common: made small, and beginning in one folder or in several."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tqdm import tqdm

import phalanx
from phalanx.models.lora import is_lora
from phalanx.recipes.distil import Distil
from phalanx.recipes.dpo import DPO
from phalanx.recipes.fine_tuning import TINY
from phalanx.recipes.reward import Reward
from phalanx.recipes.sft import SFT

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the dev extra has it)")


@pytest.mark.parametrize("kind", [SFT, DPO, Reward, Distil])
def test_each_is_made_small_on_the_shipped_rows(kind: type[phalanx.Task]) -> None:
    task = kind(path="somewhere", length=4096, lora=64, tokenizer="there").tiny()  # type: ignore[call-arg]
    assert isinstance(task, kind)
    assert (task.path, task.tokenizer, task.length, task.lora, task.small) == ("", TINY, 48, 8, True)  # type: ignore[attr-defined]
    trained = [name for name, weight in task.model().named_parameters() if weight.requires_grad]
    assert trained
    assert all(is_lora(name) or name.startswith("score.") for name in trained)


def test_a_model_and_the_one_beside_it_begin_in_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # or its bar leaves a thread behind
    torch.manual_seed(0)
    for name in ("student", "teacher"):
        task = SFT(small=True)
        task.model().save_pretrained(tmp_path / name)
        task._tokenizer.save_pretrained(tmp_path / name)
    own, others = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for name in ("student", "teacher")
    )
    for base in ("student", None):
        task = Distil(base=str(tmp_path / base) if base else TINY, teacher=str(tmp_path / "teacher"), length=64)
        with phalanx.Engine(task, device="cpu") as engine:
            found = engine.whole_weights()
        assert all(torch.equal(found[f"teacher.{name}"], weight) for name, weight in others.items())
        assert all(torch.equal(found[name], weight) for name, weight in own.items()) or base is None
    with phalanx.Engine(DPO(base=str(tmp_path / "student"), reference="beside", lora=2), device="cpu") as engine:
        found = engine.whole_weights()
    assert all(torch.equal(found[name], weight) for name, weight in own.items())
    assert all(torch.equal(found[f"reference.{name}"], weight) for name, weight in own.items())
