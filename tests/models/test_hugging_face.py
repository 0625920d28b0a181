"""Models of Hugging Face's: found in a folder, and built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx import WrongUse
from phalanx.models.hugging_face import (
    check_built_in,
    configuration,
    language_model,
    local_folder,
)
from tests.damage import ODD, written

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the dev extra has it)")


def test_a_folder_says_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WrongUse, match="does not say what model it is"):
        configuration(tmp_path)
    transformers.Qwen2Config(num_hidden_layers=7).save_pretrained(tmp_path)
    assert local_folder(tmp_path) == tmp_path
    assert configuration(tmp_path).num_hidden_layers == 7
    with pytest.raises(WrongUse, match="there is no folder 'no such model here', and no model of that name here"):
        local_folder("no such model here")


@pytest.mark.parametrize("name", ODD)
def test_a_configuration_that_makes_no_sense_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(written(name))
    for path in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(WrongUse, match=r"config\.json cannot be read \(.*\)\. Give the config\.json of a model\.$"):
            configuration(path)


@pytest.mark.parametrize("said", [{"model_type": 7}, {"model_type": "llama", "hidden_size": "x"}, {"model_type": []}])
def test_values_that_make_no_sense_are_refused_in_one_line(said: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(WrongUse, match=r"does not say what model it is \(.*\)"):
        configuration(tmp_path)


def test_code_that_comes_with_a_model_is_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor is anybody asked whether it should be."""
    monkeypatch.setattr("builtins.input", lambda words: pytest.fail(f"it asked: {words}"))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    code = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": code}))
    with pytest.raises(WrongUse, match=r"asks for code of its own by auto_map, which is never run.* no model 'mine'"):
        configuration(tmp_path)
    transformers.LlamaConfig(hidden_size=8, num_attention_heads=1, intermediate_size=8, vocab_size=9).save_pretrained(
        tmp_path
    )
    said = json.loads((tmp_path / "config.json").read_text()) | {"auto_map": code}
    (tmp_path / "config.json").write_text(json.dumps(said))
    for _ in range(2):
        assert type(language_model(configuration(tmp_path), "causal")).__name__ == "LlamaForCausalLM"
    told = f"   note  {tmp_path} has code of its own (auto_map), which is not run: it is a LlamaConfig\n"
    assert capsys.readouterr().err.count(told) == 1
    assert not (tmp_path / "ran").exists()


def test_attention_that_would_be_fetched_is_refused(tmp_path: Path) -> None:
    transformers.LlamaConfig().save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text()) | {"attn_implementation": "kernels-community/flash-attn"}
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(WrongUse, match=r"code that would be fetched and run\. Take attn_implementation out"):
        configuration(tmp_path)


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
