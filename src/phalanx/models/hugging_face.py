"""Language models of Hugging Face's: found on this machine, described by their configuration, built, made smaller."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from phalanx.errors import CannotHere, WrongUse

HEAD_WIDTH = 8
LanguageModel = Literal["causal", "masked", "scoring"]
CLASSES: dict[LanguageModel, str] = {
    "causal": "AutoModelForCausalLM", "masked": "AutoModelForMaskedLM", "scoring": "AutoModelForSequenceClassification",
}  # fmt: skip
FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def check_built_in(name: str) -> None:
    """Refuse a built-in model's name where a folder with a model has it too: nobody would see which is trained."""
    if (Path(name) / "config.json").is_file():
        raise WrongUse(
            f"base={name} is the built-in model, and there is one in the folder {name} here. Write base=./{name} for "
            "that one, or train elsewhere."
        )


def local_folder(name: str | Path) -> Path:
    """The folder of a model: itself, or where a model of this name lies on this machine, fetched if it is not there.

    Offline (HF_HUB_OFFLINE=1) nothing is fetched.
    """
    if Path(name).is_dir():
        return Path(name)
    try:
        import huggingface_hub
    except ImportError:
        raise CannotHere("a model's name needs huggingface_hub. Install it: pip install 'phalanx[sft]'") from None
    try:
        return Path(huggingface_hub.snapshot_download(str(name), allow_patterns=FILES))
    except Exception as error:  # of HTTP, of the hub's own, of values: whichever, the model is not here
        answered = isinstance(error, huggingface_hub.errors.RepositoryNotFoundError)  # gated ones as well
        why = f" (the hub: {str(error).splitlines()[0]})" if answered else ""
        raise WrongUse(
            f"there is no folder {str(name)!r}, and no model of that name here, nor could one be fetched{why}. Give "
            "the folder of a saved model."
        ) from None


def configuration(folder: str | Path) -> Any:
    """What a folder, or its ``config.json``, says of its model."""
    try:
        import transformers
    except ImportError:
        raise CannotHere("models of Hugging Face's need transformers. Install it: pip install 'phalanx[hf]'") from None
    try:
        return transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        for run in (Path(folder), Path(folder).parent):
            if (run / "final" / "certificate.json").is_file():
                raise WrongUse(
                    f"{folder} holds what a run of Phalanx's trained, without the config.json of a model. Write it as "
                    f"a model: phalanx export {run} --to FOLDER, and give that folder."
                ) from None
        raise WrongUse(
            f"{folder} does not say what model it is ({str(error).splitlines()[0]}). Give a folder with the "
            "config.json of a model."
        ) from None


def language_model(config: Any, kind: LanguageModel, dtype: torch.dtype | None = None) -> nn.Module:
    """A language model of this configuration, with weights of its own; by default in the dtype that it names."""
    import transformers

    own, given = copy.deepcopy(config), {} if dtype is None else {"dtype": dtype}
    if kind == "scoring":
        own.num_labels = 1
    try:
        model: nn.Module = getattr(transformers, CLASSES[kind]).from_config(own, **given)
    except ValueError as error:
        said = str(error).splitlines()[0]
        raise WrongUse(f"{type(config).__name__} is not of a {kind} language model ({said}). Give another.") from None
    if kind == "scoring":  # the base was of another kind, mostly
        model.config.architectures = [type(model).__name__]  # type: ignore[union-attr]
    return model


def check_length(config: Any, length: int, whose: str) -> None:
    """Refuse samples that are longer than a model has positions for."""
    most = getattr(config, "max_position_embeddings", None)
    if isinstance(most, int) and most < length:
        raise WrongUse(f"length={length} is more than {whose} has positions for, {most}. Set length to {most} or less.")


def check_apart(model: nn.Module, texts: str, advice: str) -> None:
    """Refuse a causal model that does not keep texts of one sample apart by positions that begin anew."""
    if not hasattr(sys.modules[type(model).__module__], "create_causal_mask"):
        raise WrongUse(f"{type(model).__name__} does not keep packed {texts} apart. {advice}")


def smaller(config: Any, blocks: int, heads: int, vocabulary: int) -> Any:
    """The configuration of a model of the same kind, with small sizes and so many words."""
    tiny = copy.deepcopy(config)
    heads = min(config.num_attention_heads, max(4, heads))
    keys = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    sizes = {
        "num_hidden_layers": min(config.num_hidden_layers, blocks),
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads * keys // config.num_attention_heads),
        "hidden_size": heads * HEAD_WIDTH,
        "head_dim": HEAD_WIDTH,
        "intermediate_size": 6 * HEAD_WIDTH,
        "moe_intermediate_size": 3 * HEAD_WIDTH,
        "num_local_experts": min(getattr(config, "num_local_experts", 8), 8),
        "num_experts": min(getattr(config, "num_experts", 8), 8),
        "vocab_size": vocabulary,
    }
    for name, value in sizes.items():
        if isinstance(getattr(config, name, None), int):
            setattr(tiny, name, value)
    if isinstance(getattr(tiny, "layer_types", None), list):
        tiny.layer_types = tiny.layer_types[: tiny.num_hidden_layers]
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(value := getattr(tiny, name, None), int) and value >= tiny.vocab_size:
            setattr(tiny, name, value % tiny.vocab_size)
    return tiny
