"""A model built from a Hugging Face configuration file, with weights of its own."""

from __future__ import annotations

from torch import nn

from phalanx.errors import WrongUse
from phalanx.models.hugging_face import LanguageModel, check_length, configuration, language_model, vocabulary_of


def from_config(kind: LanguageModel, path: str, vocabulary: int, length: int) -> nn.Module:
    """A language model of this kind; a configuration whose sizes do not hold the data is refused."""
    config = configuration(path)
    known = vocabulary_of(config, path, kind)
    if known < vocabulary:
        raise WrongUse(
            f"the tokenizer has {vocabulary:,} ids, and {path} says vocab_size={known:,}. Set it to {vocabulary} or "
            "more there."
        )
    check_length(config, length, path)
    return language_model(config, kind)
