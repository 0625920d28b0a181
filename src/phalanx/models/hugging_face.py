"""Language models of Hugging Face's: found on this machine, described by their configuration, built."""

from __future__ import annotations

import copy
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from phalanx import configs, streams
from phalanx.errors import CannotHere, WrongUse
from phalanx.events import say
from phalanx.files import json_object

LanguageModel = Literal["causal", "masked", "scoring"]
CLASSES: dict[LanguageModel, str] = {
    "causal": "AutoModelForCausalLM", "masked": "AutoModelForMaskedLM", "scoring": "AutoModelForSequenceClassification",
}  # fmt: skip
CONFIG = "config.json"
FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def check_built_in(name: str) -> None:
    """Refuse a built-in model's name where a folder with a model has it too: nobody would see which is trained."""
    if (Path(name) / CONFIG).is_file():
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
    said = _said(Path(folder))
    try:
        found = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of whatever kind: what the files say is somebody else's
        if "auto_map" in said:
            raise WrongUse(
                f"{folder} asks for code of its own by auto_map, which is never run, and transformers has no model "
                f"{said.get('model_type')!r}. Give a model that transformers has."
            ) from None
        for run in (Path(folder), Path(folder).parent):
            if (run / "final" / "certificate.json").is_file():
                raise WrongUse(
                    f"{folder} holds what a run of Phalanx's trained, without the config.json of a model. Write it as "
                    f"a model: phalanx export {run} --to FOLDER, and give that folder."
                ) from None
        why = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise WrongUse(
            f"{folder} does not say what model it is ({why}). Give a folder with the config.json of a model."
        ) from None
    if "auto_map" in said:
        _tell_code(str(folder), type(found).__name__)
    attention = getattr(found, "_attn_implementation", None)
    if isinstance(attention, str) and "/" in attention:
        raise WrongUse(
            f"{folder} asks for attention by {attention!r}, code that would be fetched and run. Take "
            "attn_implementation out of its config.json."
        )
    return found


def _said(folder: Path) -> dict[str, Any]:
    """What a model's ``config.json`` says, of a folder or by itself; nothing where there is none."""
    path = folder / CONFIG if folder.is_dir() else folder
    if not path.is_file():
        return {}
    try:
        return json_object(path)
    except (OSError, ValueError) as error:
        raise WrongUse(f"{path} cannot be read ({error}). Give the config.json of a model.") from None


@cache
def _tell_code(folder: str, kind: str) -> None:
    """Once, of code that comes with a model and is left alone."""
    if os.environ.get("RANK", "0") == "0":
        say(f"   note  {folder} has code of its own (auto_map), which is not run: it is a {kind}", streams.stderr())


def language_model(config: Any, kind: LanguageModel, dtype: torch.dtype | None = None) -> nn.Module:
    """A language model of this configuration, with weights of its own; by default in the dtype that it names."""
    import transformers

    own, given = copy.deepcopy(config), {} if dtype is None else {"dtype": dtype}
    if kind == "scoring":
        own.num_labels = 1
    try:
        model: nn.Module = getattr(transformers, CLASSES[kind]).from_config(own, trust_remote_code=False, **given)
    except ValueError as error:
        said = str(error).splitlines()[0]
        raise WrongUse(f"{type(config).__name__} is not of a {kind} language model ({said}). Give another.") from None
    if kind == "scoring":  # the base was of another kind, mostly
        model.config.architectures = [type(model).__name__]  # type: ignore[union-attr]
    return model


def check_length(config: Any, length: int, whose: str) -> None:
    """Refuse samples that are longer than a model has positions for."""
    most = configs.positions(config)
    if most is not None and most < length:
        raise WrongUse(f"length={length} is more than {whose} has positions for, {most}. Set length to {most} or less.")


def vocabulary_of(config: Any, whose: str, kind: LanguageModel = "causal") -> int:
    """How many tokens a model has; one that has none is refused."""
    found = configs.vocabulary(config)
    if found is None:
        raise WrongUse(f"{whose} says no vocab_size: it is not of a {kind} language model. Give another.")
    return found


def check_apart(model: nn.Module, texts: str, advice: str) -> None:
    """Refuse a causal model that does not keep texts of one sample apart by positions that begin anew."""
    if not hasattr(sys.modules[type(model).__module__], "create_causal_mask"):
        raise WrongUse(f"{type(model).__name__} does not keep packed {texts} apart. {advice}")
