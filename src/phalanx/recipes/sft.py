"""Supervised fine-tuning: a causal language model of Hugging Face's learns to answer as the rows of a file do."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

import phalanx
from phalanx.data.chat import Chat, LossOn, Marks
from phalanx.data.chat_tokenizer import opened, trained
from phalanx.data.conversations import conversation
from phalanx.data.encoded_rows import encoded_once
from phalanx.data.row_file import RowFile
from phalanx.data.rows import BadRows
from phalanx.data.splitting import split
from phalanx.data.supervised import Encoded, Supervised, padded_together
from phalanx.models.adapters import Adapter
from phalanx.models.hugging_face import check_apart, check_length, configuration, language_model, local_folder, smaller
from phalanx.models.lora import FOUR_BITS, MAGNITUDE, Lora, LoraKind, attach, is_four_bit, is_lora, lengths
from phalanx.models.nf4 import FourBits, quantised
from phalanx.precision import DTYPES
from phalanx.words import many

HEALTH = Path(__file__).parent / "data" / "health.jsonl"
"""Questions about health and their answers: short, general, written for this recipe."""
TINY = "tiny"
TINY_TOKENS, SMALL_BLOCKS, SMALL_HEADS, SMALL_LENGTH, SMALL_RANK = 512, 4, 4, 48, 8
ALPHA = 16.0
OF_LORA = ("lora_alpha", "lora_targets", "lora_kind", "lora_dropout", "four_bit", "base_dtype", "adapter")
"""Settings that have no effect without it."""


@dataclass
class SFT(phalanx.Task):
    """Learn the answers of a file of conversations."""

    base: str = TINY
    """A folder with a model, its name, or ``tiny``: a small Llama without any training."""
    tokenizer: str = ""
    """A folder, a name, or ``tiny``: made from the shipped data. By default the base model's."""
    chat_template: str = ""
    """A file to write conversations by, instead of the tokenizer's own."""
    path: str = ""
    """RowFile: .jsonl, .json, .csv, .parquet, or a folder of Hugging Face's datasets. By default the shipped ones."""
    cache: str = ""
    """A folder for encoded rows; by default in the user's own for such things."""
    share_held_out: float = 0.1
    length: int = 128
    packed: bool = True
    """Several conversations a sample, as many as fit; otherwise each is one, padded."""
    loss_on: LossOn = "answers"
    marks: Marks = "auto"
    bad_rows: BadRows = "stop"
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
    rate: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate goes on after the warm-up: down to a tenth, down to nothing, or as it is."""
    weight_decay: float = 0.0

    counts = "tokens"

    def check(self) -> None:
        super().check()
        if self.length < 8:
            raise phalanx.WrongUse(f"length={self.length} has no room for an answer. Set it to 8 or more.")
        if not 0 <= self.share_held_out < 1:
            raise phalanx.WrongUse(f"share_held_out={self.share_held_out} is no share. Set it from 0 to below 1.")

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
        if self.adapter and self.base == TINY:
            raise phalanx.WrongUse(f"adapter={self.adapter} belongs to a model, and base=tiny is none. Set base to it.")

    def tiny(self) -> SFT:
        """The same kind of model and task at small sizes, on the shipped rows."""
        return dataclasses.replace(
            self, small=True, path="", tokenizer=TINY, chat_template="", length=min(self.length, SMALL_LENGTH),
            adapter="", lora=min(self.lora, SMALL_RANK),
        )  # fmt: skip

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
        if self.base == TINY:
            import transformers

            found = transformers.LlamaConfig(
                vocab_size=len(self._tokenizer), hidden_size=64, intermediate_size=160, num_hidden_layers=4,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=False,
                bos_token_id=None, eos_token_id=self._tokenizer.eos_token_id, pad_token_id=self._pad,
            )  # fmt: skip
        else:
            found = configuration(local_folder(self.base))
        return smaller(found, SMALL_BLOCKS, SMALL_HEADS, len(self._tokenizer)) if self.small else found

    @property
    def _pad(self) -> int:
        known = (self._tokenizer.pad_token_id, self._tokenizer.eos_token_id, 0)
        return next(token for token in known if token is not None)

    def model(self) -> nn.Module:
        dtype = None if self.base_dtype == "saved" else DTYPES[self.base_dtype].compute
        model = language_model(self._config, "causal", dtype)
        if self.packed:
            check_apart(model, "conversations", "Set packed=false: each is a sample.")
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

    def pretrained(self) -> Path | None:
        return None if self.small or self.base == TINY else local_folder(self.base)

    def write_along(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)

    @cached_property
    def _encoded(self) -> Encoded:
        check_length(self._config, self.length, f"base={self.base}")
        chat = Chat(self._tokenizer, self.loss_on, self.marks)
        known = os.environ.get("XDG_CACHE_HOME")
        cache = Path(self.cache) if self.cache else Path(known or Path.home() / ".cache") / "phalanx" / "rows"
        rows, words = RowFile(self.path or HEALTH), self._config.vocab_size
        return encoded_once(rows, chat, self.length, words, self.bad_rows, cache)

    def _samples(self, held_out: bool) -> Supervised:
        documents = self._encoded.documents
        if self.share_held_out:
            self._check_share(len(documents))
            part = split(documents, self.share_held_out)[held_out]
            documents = [part[index] for index in range(len(part))]
        return Supervised(documents, self.length if self.packed else None, self._pad)

    def _check_share(self, rows: int) -> None:
        held_out = round(rows * self.share_held_out)
        if 0 < held_out < rows:
            return
        other = f", or to {math.ceil(100 / rows) / 100:g} or more" if not held_out else ", or lower"
        raise phalanx.WrongUse(
            f"share_held_out={self.share_held_out} of {many(rows, 'row')} is {'all' if held_out else 'none'} of them. "
            f"Set share_held_out to 0{other if rows > 1 else ''}."
        )

    @cached_property
    def _training(self) -> Supervised:
        return self._samples(held_out=False)

    def data(self) -> Supervised:
        return self._training

    def held_out(self) -> Supervised | None:
        return self._samples(held_out=True) if self.share_held_out else None

    def overview(self) -> tuple[dict[str, str], list[str]]:
        """What became of the rows."""
        found = self._encoded
        good, trained_on = len(found.documents), len(self._training.documents)
        apart = {"left out": found.rows - good, "held out": good - trained_on}
        parts = [f"{number:,} {what}" for what, number in apart.items() if number]
        notes = [f"left out: {found.left_out}"] if found.left_out else []
        if found.cut:
            notes.append(f"{many(found.cut, 'row')} of {self.path or HEALTH} cut off at length={self.length} tokens")
        return {"rows": f"{found.rows:,}: {', '.join([*parts, self._training.describe()])}"}, notes

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return padded_together(samples, self._pad)

    def inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Positions that begin anew are what tells a model where a packed conversation begins."""
        found = {"input_ids": batch["tokens"]}
        return found | {"position_ids": batch["positions"]} if self.packed else found

    def loss(self, output: Any, batch: dict[str, Any]) -> phalanx.Loss:
        return phalanx.losses.cross_entropy(output.logits, batch["targets"])

    def schedule(self) -> Callable[[int], float] | Mapping[str, Callable[[int], float]]:
        if self.rate == "cosine":
            return super().schedule()

        def factor(step: int) -> float:
            if step < self.warmup_steps:
                return (step + 1) / self.warmup_steps
            done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
            return 1.0 if self.rate == "constant" else max(0.0, 1.0 - done)

        return factor
