"""What recipes that tune a model of Hugging Face's have in common: where it begins, its tokenizer, LoRA, its rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

import phalanx
from phalanx.data.by_length import ByLength
from phalanx.data.chat import Marks
from phalanx.data.chat_tokenizer import opened, trained
from phalanx.data.conversations import conversation
from phalanx.data.row_file import RowFile
from phalanx.models.adapters import Adapter
from phalanx.models.hugging_face import (
    LanguageModel,
    check_built_in,
    configuration,
    language_model,
    local_folder,
)
from phalanx.models.lora import FOUR_BITS, MAGNITUDE, Lora, LoraKind, attach, is_four_bit, is_lora, lengths
from phalanx.models.nf4 import FourBits, quantised
from phalanx.models.smaller import smaller
from phalanx.precision import DTYPES
from phalanx.words import many

HEALTH = Path(__file__).parent / "data" / "health.jsonl"
"""Questions about health and their answers: short, general, written for these recipes."""
TINY = "tiny"
TINY_TOKENS, SMALL_BLOCKS, SMALL_HEADS, SMALL_LENGTH, SMALL_RANK = 512, 4, 4, 48, 8
ALPHA = 16.0
OF_LORA = ("lora_alpha", "lora_targets", "lora_kind", "lora_dropout", "four_bit", "base_dtype", "adapter")
"""Settings that have no effect without it."""


@dataclass
class FineTuning(phalanx.Task):
    """Begin with a model of Hugging Face's, and train all of it or LoRA beside its linears."""

    base: str = TINY
    """A folder with a model, its name, or ``tiny``: a small Llama without any training."""
    tokenizer: str = ""
    """A folder, a name, or ``tiny``: made from the shipped data. By default the base model's."""
    chat_template: str = ""
    """A file to write conversations by, instead of the tokenizer's own."""
    path: str = ""
    """RowFile: .jsonl, .json, .csv, .parquet, or a folder of Hugging Face's datasets. By default the shipped ones."""
    share_held_out: float = 0.1
    length: int = 128
    group_by_length: bool = False
    """Samples of a step have about one length."""
    batch_tokens: int = 0
    """A step has so many tokens at most, of as many samples as have them; 0: ``global_batch`` samples."""
    marks: Marks = "auto"
    small: bool = False
    """A model of the base's kind with few and narrow blocks, and weights of its own."""
    lora: int = 0
    """The rank of what is trained beside each linear; 0: all weights are trained."""
    lora_alpha: float = ALPHA
    lora_targets: list[str] = dataclasses.field(default_factory=list)
    """Names of linears, or regular expressions; by default all of the blocks."""
    lora_kind: LoraKind = "lora"
    lora_dropout: float = 0.0
    four_bit: bool = False
    """The weights that LoRA stands beside are kept in 4 bits (NF4)."""
    base_dtype: Literal["saved", "bf16", "fp16", "fp32"] = "saved"
    """What the frozen weights are read as; with that precision they are kept so too."""
    adapter: str = ""
    """A folder with LoRA of peft's to begin from."""
    global_batch: int = 8
    steps: int = 100
    learning_rate: float = 2e-4
    weight_decay: float = 0.0

    def check(self) -> None:
        super().check()
        if self.length < 8:
            raise phalanx.WrongUse(f"length={self.length} has no room for an answer. Set it to 8 or more.")
        if not 0 <= self.share_held_out < 1:
            raise phalanx.WrongUse(f"share_held_out={self.share_held_out} is no share. Set it from 0 to below 1.")
        if self.batch_tokens < 0:
            raise phalanx.WrongUse(f"batch_tokens={self.batch_tokens} is no number of tokens. Set it to 0 or more.")
        if self.lora < 0:
            raise phalanx.WrongUse(f"lora={self.lora} is no rank. Set lora to one from 1 up, or to 0 for none.")
        if not 0 <= self.lora_dropout < 1:
            raise phalanx.WrongUse(f"lora_dropout={self.lora_dropout} is no share. Set it from 0 to below 1.")
        if not 0 < self.lora_alpha < math.inf:
            raise phalanx.WrongUse(f"lora_alpha={self.lora_alpha} is no factor. Set it above 0, such as {ALPHA:g}.")
        if self.lora and self.precision.startswith("fp8"):
            raise phalanx.WrongUse(f"lora={self.lora} computes its linears itself, not in 8 bits. Set precision=bf16.")
        if self.base_dtype in ("bf16", "fp16") and self.precision not in (
            self.base_dtype,
            "float64",
        ):  # that is a proof
            raise phalanx.WrongUse(
                f"base_dtype={self.base_dtype} would round the frozen weights and save nothing with "
                f"precision={self.precision}. Set precision={self.base_dtype}, or leave base_dtype out."
            )
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        chosen = [name for name in OF_LORA if (value := getattr(self, name)) and value != defaults[name]]
        if chosen and not self.lora:
            raise phalanx.WrongUse(
                f"{' and '.join(chosen)} would have no effect without LoRA. Set lora to a rank, such as 16."
            )
        if self.base == TINY:
            check_built_in(TINY)
        if self.adapter and self.base == TINY:
            raise phalanx.WrongUse(f"adapter={self.adapter} belongs to a model, and base=tiny is none. Set base to it.")

    def prepare(self) -> None:
        self.data()
        self.held_out()

    def by_length(self, data: Any, lengths: Callable[[], Sequence[int]]) -> Any:
        """Samples in the order that is asked for; ``lengths`` gives the tokens of each."""
        if not (self.group_by_length or self.batch_tokens):
            return data
        return ByLength(data, lengths(), grouped=self.group_by_length, batch_tokens=self.batch_tokens)

    def made_small(self) -> dict[str, Any]:
        """Settings of the same kind of model and task at small sizes, on the shipped rows."""
        return {
            "small": True, "path": "", "tokenizer": TINY, "chat_template": "", "adapter": "",
            "length": min(self.length, SMALL_LENGTH), "lora": min(self.lora, SMALL_RANK),
        }  # fmt: skip

    @cached_property
    def _tokenizer(self) -> Any:
        name = self.tokenizer or self.base
        if name != TINY:
            return opened(local_folder(name), self.chat_template)
        rows = RowFile(HEALTH)
        messages = (message for index in range(len(rows)) for message in conversation(rows[index]))
        return trained([message["content"] for message in messages], TINY_TOKENS)

    @cached_property
    def _config(self) -> Any:
        return self.made_smaller(self.tiny_config() if self.base == TINY else configuration(local_folder(self.base)))

    def tiny_config(self) -> Any:
        """Of a small Llama."""
        import transformers

        return transformers.LlamaConfig(
            vocab_size=len(self._tokenizer), hidden_size=64, intermediate_size=160, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=False,
            bos_token_id=None, eos_token_id=self._tokenizer.eos_token_id, pad_token_id=self._pad,
        )  # fmt: skip

    def made_smaller(self, config: Any) -> Any:
        """A configuration as it is, or with small sizes where that is asked for."""
        return smaller(config, SMALL_BLOCKS, SMALL_HEADS, len(self._tokenizer)) if self.small else config

    @property
    def _pad(self) -> int:
        known = (self._tokenizer.pad_token_id, self._tokenizer.eos_token_id, 0)
        return next(token for token in known if token is not None)

    def tuned(self, kind: LanguageModel) -> nn.Module:
        """A model of the base's configuration, with LoRA beside its linears where that is asked for."""
        dtype = None if self.base_dtype == "saved" else DTYPES[self.base_dtype].compute
        return self.with_lora(language_model(self._config, kind, dtype))

    def with_lora(self, model: nn.Module) -> nn.Module:
        """LoRA beside a model's linears, where that is asked for."""
        if self.lora:
            attach(model, self._lora, self.lora_targets, self.four_bit)
        if self._adapter is not None:
            self._adapter.check_used([name for name, _ in model.named_parameters() if is_lora(name)])
        return model

    @property
    def _lora(self) -> Lora:
        return Lora(self.lora, self.lora_alpha, self.lora_kind, self.lora_dropout)

    @cached_property
    def _adapter(self) -> Adapter | None:
        return Adapter(self.adapter, self._lora) if self.adapter else None

    @cached_property
    def _quantised(self) -> dict[str, FourBits]:
        return {}

    def added(self, weight: str) -> bool:
        return bool(self.lora) and (is_lora(weight) or is_four_bit(weight))

    def begins(self, weight: str, read: Callable[[str], Tensor]) -> Tensor | None:
        if is_four_bit(weight):
            owner, _, part = weight.rpartition(".")
            if owner not in self._quantised:  # the parts of one are asked for in a row
                self._quantised.clear()
                self._quantised[owner] = quantised(read(f"{owner}.weight"))
            return self._quantised[owner][FOUR_BITS.index(part)]
        if self._adapter is not None:
            return self._adapter(weight)
        return lengths(read(f"{weight.rpartition('.')[0]}.weight").float()) if weight.endswith(MAGNITUDE) else None

    def pretrained(self) -> Path | Mapping[str, Path] | None:
        return None if self.small or self.base == TINY else local_folder(self.base)

    def write_along(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)

    def _check_share(self, rows: int) -> None:
        held_out = round(rows * self.share_held_out)
        if 0 < held_out < rows:
            return
        other = f", or to {math.ceil(100 / rows) / 100:g} or more" if not held_out else ", or lower"
        raise phalanx.WrongUse(
            f"share_held_out={self.share_held_out} of {many(rows, 'row')} is {'all' if held_out else 'none'} of them. "
            f"Set share_held_out to 0{other if rows > 1 else ''}."
        )
