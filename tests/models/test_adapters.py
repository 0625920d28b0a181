"""LoRA in peft's files: refused where it is not what the task asks for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from phalanx import WrongUse
from phalanx.models.adapters import CONFIG, WEIGHTS, Adapter, adapter_config
from phalanx.models.lora import Lora
from tests.damage import ODD
from tests.damage import written as damaged


def written(folder: Path, **changes: object) -> Path:
    said = adapter_config(Lora(2, 4.0), ["h.0.up"], ["h.0.up", "h.1.up"], "base") | changes
    (folder / CONFIG).write_text(json.dumps(said))
    save_file({"base_model.model.h.0.up.lora_A.weight": torch.arange(6.0).view(2, 3)}, folder / WEIGHTS)
    return folder


def test_weights_are_found_by_the_models_names(tmp_path: Path) -> None:
    adapter = Adapter(written(tmp_path), Lora(2, 4.0))
    assert torch.equal(adapter("h.0.up.lora_A.weight"), torch.arange(6.0).view(2, 3))
    with pytest.raises(WrongUse, match=r"has no base_model\.model\.h\.1\.up"):
        adapter("h.1.up.lora_A.weight")
    adapter.check_used(["h.0.up.lora_A.weight"])
    with pytest.raises(WrongUse, match="the model has no LoRA there"):
        adapter.check_used(["h.1.up.lora_A.weight"])


def test_linears_are_named_by_their_last_parts_where_that_is_enough() -> None:
    every = ["h.0.up", "h.1.up", "h.0.down"]
    assert adapter_config(Lora(2, 4.0), every[:2], every, None)["target_modules"] == ["up"]
    assert adapter_config(Lora(2, 4.0), every[:1], every, None)["target_modules"] == ["h.0.up"]


@pytest.mark.parametrize(("changes", "words"), [
    ({"r": 3}, "has lora=3, and the task lora=2. Set lora=3"),
    ({"lora_alpha": 1}, "Set lora_alpha=1"),
    ({"use_dora": True}, "Set lora_kind=dora"),
    ({"rank_pattern": {"up": 3}}, "has a rank_pattern"),
])  # fmt: skip
def test_another_kind_is_refused(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(WrongUse, match=words):
        Adapter(written(tmp_path, **changes), Lora(2, 4.0))


@pytest.mark.parametrize("name", ODD)
def test_what_is_no_object_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / CONFIG).write_bytes(damaged(name))
    with pytest.raises(WrongUse, match=r"is not a whole folder of peft's \(ValueError|is not a whole .*Error"):
        Adapter(tmp_path, Lora(2, 4.0))


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="is not a whole folder of peft's"):
        Adapter(tmp_path, Lora(2, 4.0))
