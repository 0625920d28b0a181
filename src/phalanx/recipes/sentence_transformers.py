"""A folder with an embedder, described so that sentence-transformers reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.models.embedder import Pooling

POOLINGS: dict[Pooling, str] = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "last": "pooling_mode_lasttoken",
}
MODULES = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
"""What a text goes through, and where each is described; in words that all releases know."""


@dataclass(frozen=True)
class Described:
    """What is to be known of an embedder beside its model and tokenizer."""

    width: int
    pooling: Pooling
    length: int
    """Tokens at which texts are cut off."""
    prompts: Mapping[str, str]
    """What stands before a query, and before a document."""


def describe(folder: Path, embedder: Described) -> None:
    """Write what sentence-transformers reads beside a model of Hugging Face's."""
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(MODULES.items())
    ]
    ways = {name: kind == embedder.pooling for kind, name in POOLINGS.items()}
    files = {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": embedder.length, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": dict(embedder.prompts), "similarity_fn_name": "cosine"},
        "1_Pooling/config.json": {"word_embedding_dimension": embedder.width, **ways, "include_prompt": True},
        "2_Normalize/config.json": {},
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
