"""An exported embedder gives the same vectors in sentence-transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tqdm import tqdm

from phalanx.data.search_rows import SearchRows, Texts, padded_together
from phalanx.recipes.embed import Embed
from phalanx.train.exporting import export_run
from phalanx.train.from_python import train

st = pytest.importorskip("sentence_transformers", reason="no sentence-transformers (the dev extra has it)")


@pytest.fixture(autouse=True)
def no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it leaves a thread behind."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)


TEXTS = ["What does the heart do?", "heart", "A vein carries blood back to the heart. " * 9]


@pytest.mark.parametrize("settings", [
    {"pooling": "mean", "query_prompt": "query: "},
    {"pooling": "last", "base": "llama"},
], ids=["BERT", "Llama"])  # fmt: skip
def test_vectors_are_equal(settings: dict[str, Any], tmp_path: Path) -> None:
    if settings.get("base"):
        import transformers

        tokenizer = Embed()._tokenizer
        config = transformers.LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
        )
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
        tokenizer.save_pretrained(tmp_path / "llama")
        settings = settings | {"base": str(tmp_path / "llama")}
    task = Embed(**settings, length=40, global_batch=4, steps=2)
    train(task, run=str(tmp_path / "run"), device="cpu")
    export_run(tmp_path / "run", tmp_path / "to")
    theirs = st.SentenceTransformer(str(tmp_path / "to"), device="cpu")
    rows = SearchRows([Texts(text, text, ()) for text in TEXTS], task._encode, 0, (task.query_prompt, ""))
    batch = padded_together([rows[index] for index in range(len(TEXTS))], task._pad)
    model = task.model().eval()
    model.load_state_dict(load_file(tmp_path / "run" / "final" / "model.safetensors"), strict=False)
    with torch.no_grad():
        ours = F.normalize(model(**task.inputs(batch)), dim=-1)
    for place, name in enumerate(("query", "document")):
        found = theirs.encode(TEXTS, prompt_name=name, convert_to_tensor=True)
        assert torch.allclose(found, ours[:, place], atol=1e-6)
