"""Tokenizers of Hugging Face's: opened where they lie, or a small one made on the spot from a few texts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from phalanx.data.tokenizer import CONFIG, FILE, byte_pairs
from phalanx.errors import CannotHere, WrongUse
from phalanx.files import json_object

PAD, END = "<|pad|>", "<|end|>"
ROLES = ("system", "user", "assistant")
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}" + END + "{% endgeneration %}"
    "{% else %}{{ message['content'] }}" + END + "{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise CannotHere("fine-tuning needs transformers. Install it: pip install 'phalanx[sft]'") from None
    return transformers


def opened(folder: str | Path, template: str = "") -> Any:
    """The tokenizer in a folder; with a ``template`` file, conversations are written as that says."""
    tokenizers, said = _transformers().AutoTokenizer, dict[str, Any]()
    try:
        for path in (Path(folder) / FILE, Path(folder) / CONFIG):
            said = json_object(path) if path.is_file() else {}
        tokenizer = tokenizers.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of whatever kind: what the files say is somebody else's
        why = next(iter(str(error).splitlines()), "") or type(error).__name__
        if "auto_map" in said:
            why = f"{CONFIG} asks for code of its own by auto_map, which is never run"
        raise WrongUse(f"there is no tokenizer in {folder} ({why}). Set tokenizer to the folder of one.") from None
    if template:
        if not Path(template).is_file():
            raise WrongUse(f"the chat template {template} is not there. Give a file, as chat_template.jinja.")
        tokenizer.chat_template = Path(template).read_text()
    return tokenizer


def trained(texts: Iterable[str], size: int) -> Any:
    """A byte-level BPE tokenizer of at most so many tokens, made from texts, with a chat template of its own."""
    kind = _transformers().PreTrainedTokenizerFast
    special = [PAD, END, *(f"<|{role}|>" for role in ROLES)]
    made = kind(tokenizer_object=byte_pairs(texts, size, special), pad_token=PAD, eos_token=END)
    made.chat_template = TEMPLATE
    return made
