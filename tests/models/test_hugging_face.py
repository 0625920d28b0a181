"""Models of Hugging Face's: found in a folder, and made smaller."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx import WrongUse
from phalanx.models.hugging_face import (
    check_apart,
    check_built_in,
    configuration,
    language_model,
    local_folder,
    smaller,
)

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the dev extra has it)")


def test_a_folder_says_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WrongUse, match="does not say what model it is"):
        configuration(tmp_path)
    transformers.Qwen2Config(num_hidden_layers=7).save_pretrained(tmp_path)
    assert local_folder(tmp_path) == tmp_path
    assert configuration(tmp_path).num_hidden_layers == 7
    with pytest.raises(WrongUse, match="there is no folder 'no such model here', and no model of that name here"):
        local_folder("no such model here")


def test_a_smaller_one_is_of_the_same_kind() -> None:
    config = transformers.Qwen2Config(num_hidden_layers=7, bos_token_id=151643)
    tiny = smaller(config, 2, 4, 131)
    model = language_model(tiny, "causal")
    check_apart(model, "texts", "")
    assert type(model) is transformers.Qwen2ForCausalLM
    assert len(model.model.layers) == 2
    assert sum(weight.numel() for weight in model.parameters()) < 100_000
    assert tiny.bos_token_id < 131
    assert config.num_hidden_layers == 7


def test_what_a_run_trained_is_to_be_exported_first(tmp_path: Path) -> None:
    (tmp_path / "run" / "final").mkdir(parents=True)
    (tmp_path / "run" / "final" / "certificate.json").write_text("{}")
    for folder in (tmp_path / "run", tmp_path / "run" / "final"):
        with pytest.raises(WrongUse, match=f"{folder} holds .* phalanx export {tmp_path / 'run'} --to FOLDER"):
            configuration(folder)


def test_what_is_no_such_model_is_refused() -> None:
    with pytest.raises(WrongUse, match="CLIPVisionConfig is not of a causal language model"):
        language_model(transformers.CLIPVisionConfig(), "causal")
    with pytest.raises(WrongUse, match="LlamaConfig is not of a masked language model"):
        language_model(transformers.LlamaConfig(), "masked")


def test_a_folder_with_the_name_of_a_built_in_model_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    check_built_in("tiny")
    (tmp_path / "tiny" / "config.json").write_text("{}")
    with pytest.raises(WrongUse, match=r"Write base=\./tiny for that one"):
        check_built_in("tiny")
