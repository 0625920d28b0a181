"""A model from a configuration: one that does not hold the data is refused before anything trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx import WrongUse
from phalanx.recipes.hugging_face import from_config

transformers = pytest.importorskip("transformers", reason="no transformers (pip install 'phalanx[hf]')")


def test_sizes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.LlamaConfig(vocab_size=50, max_position_embeddings=32, **sizes).save_pretrained(tmp_path)
    model = from_config("causal", str(tmp_path), 50, 32)
    assert type(model).__name__ == "LlamaForCausalLM"
    with pytest.raises(WrongUse, match=r"vocab_size=50\. Set it to 51 or more there"):
        from_config("causal", str(tmp_path), 51, 32)
    with pytest.raises(WrongUse, match="Set length to 32 or less"):
        from_config("causal", str(tmp_path), 50, 33)
    with pytest.raises(WrongUse, match="does not say what model it is"):
        from_config("causal", str(tmp_path / "none"), 50, 32)


def test_what_is_no_language_model_is_refused(tmp_path: Path) -> None:
    transformers.CLIPVisionConfig().save_pretrained(tmp_path / "vision")
    with pytest.raises(WrongUse, match="says no vocab_size: it is not of a causal language model"):
        from_config("causal", str(tmp_path / "vision"), 50, 32)
    transformers.LlamaConfig(vocab_size=50).save_pretrained(tmp_path / "llama")
    with pytest.raises(WrongUse, match="LlamaConfig is not of a masked language model"):
        from_config("masked", str(tmp_path / "llama"), 50, 32)
