"""A model built from a Hugging Face configuration file, with weights of its own."""

from __future__ import annotations

from typing import Any

from torch import nn

from phalanx.errors import CannotHere, WrongUse


def from_config(kind: str, path: str, vocabulary: int, length: int) -> nn.Module:
    """A model of this ``AutoModel`` class; a configuration whose sizes do not hold the data is refused."""
    try:
        import transformers
    except ImportError:
        raise CannotHere("config needs transformers. Install it: pip install 'phalanx[hf]'") from None
    try:
        config: Any = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise WrongUse(f"config={path} is no configuration that can be read: {reason} Give a config.json.") from None
    if config.vocab_size < vocabulary:
        raise WrongUse(
            f"the tokenizer has {vocabulary:,} ids, and {path} says vocab_size={config.vocab_size:,}. Set it to "
            f"{vocabulary} or more there."
        )
    most = getattr(config, "max_position_embeddings", length)
    if most < length:
        raise WrongUse(f"length={length} is more than {path} has positions for, {most}. Set length to {most} or less.")
    return getattr(transformers, kind).from_config(config)
