"""A text embedder for search: queries come to lie near the texts that answer them, and far from all others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import phalanx
from phalanx import configs
from phalanx.data.chat_tokenizer import opened, trained
from phalanx.data.row_file import RowFile
from phalanx.data.search_rows import ABSENT, Read, SearchRows, padded_together, read
from phalanx.data.splitting import split
from phalanx.models.embedder import Embedder, Pooling, embedder
from phalanx.models.hugging_face import check_built_in, check_length, configuration, local_folder, vocabulary_of
from phalanx.models.smaller import smaller
from phalanx.recipes.retrieval import retrieval
from phalanx.recipes.sentence_transformers import Described, describe
from phalanx.words import many

HEALTH_SEARCH = Path(__file__).parent / "data" / "health_search.jsonl"
"""Questions and search words about health, the texts that answer them, and others that are near; written for this."""
TINY = "tiny"
TINY_TOKENS, SMALL_BLOCKS, SMALL_HEADS, SMALL_LENGTH = 512, 4, 4, 24


@dataclass
class Embed(phalanx.Task):
    """Learn which text answers which query."""

    base: str = TINY
    """A folder with an encoder or a causal language model, its name, or ``tiny``: a small BERT without any training."""
    tokenizer: str = ""
    """A folder, a name, or ``tiny``: made from the shipped data. By default the base model's."""
    path: str = ""
    """RowFile: .jsonl, .json, .csv, .parquet, or a folder of Hugging Face's datasets. By default the shipped ones."""
    share_held_out: float = 0.1
    length: int = 64
    """Tokens of a text; longer ones are cut off."""
    pooling: Pooling = "mean"
    temperature: float = 0.05
    """What cosines are divided by."""
    negatives: int = 4
    """Hard negatives of a row that are used, at most."""
    sizes: list[int] = dataclasses.field(default_factory=list)
    """Matryoshka: the first so many numbers of a vector shall be a vector too; the loss of each is added."""
    query_prompt: str = ""
    text_prompt: str = ""
    small: bool = False
    """A model of the base's kind with few and narrow blocks, and weights of its own."""
    global_batch: int = 32
    steps: int = 100
    learning_rate: float = 2e-4
    weight_decay: float = 0.01

    def check(self) -> None:
        super().check()
        if self.base == TINY:
            check_built_in(TINY)
        if self.length < 2:
            raise phalanx.WrongUse(f"length={self.length} has no room for a text. Set it to 2 or more.")
        if not 0 <= self.share_held_out < 1:
            raise phalanx.WrongUse(f"share_held_out={self.share_held_out} is no share. Set it from 0 to below 1.")
        if not 0 < self.temperature < math.inf:
            raise phalanx.WrongUse(f"temperature={self.temperature} is none. Set it above 0, such as 0.05.")
        if self.negatives < 0:
            raise phalanx.WrongUse(f"negatives={self.negatives} is no number of texts. Set it to 0 or more.")

    def tiny(self) -> Embed:
        """The same kind of model and task at small sizes, on the shipped rows."""
        width = SMALL_HEADS * 8
        return dataclasses.replace(
            self, small=True, path="", tokenizer=TINY, length=min(self.length, SMALL_LENGTH),
            sizes=[max(1, width // 2**number) for number, _ in enumerate(self.sizes, start=1)],
        )  # fmt: skip

    @cached_property
    def _tokenizer(self) -> Any:
        name = self.tokenizer or self.base
        if name != TINY:
            return opened(local_folder(name))
        rows = read(RowFile(HEALTH_SEARCH)).rows
        return trained([text for row in rows for text in (row.query, row.positive)], TINY_TOKENS)

    @cached_property
    def _config(self) -> Any:
        if self.base == TINY:
            import transformers

            found = transformers.BertConfig(
                vocab_size=len(self._tokenizer), hidden_size=64, intermediate_size=160, num_hidden_layers=4,
                num_attention_heads=4, max_position_embeddings=512, pad_token_id=self._pad,
            )  # fmt: skip
        else:
            found = configuration(local_folder(self.base))
        return smaller(found, SMALL_BLOCKS, SMALL_HEADS, len(self._tokenizer)) if self.small else found

    @property
    def _pad(self) -> int:
        known = (self._tokenizer.pad_token_id, self._tokenizer.eos_token_id, 0)
        return next(token for token in known if token is not None)

    @property
    def _width(self) -> int:
        width = configs.hidden(self._config)
        if width is None:
            raise phalanx.WrongUse(f"base={self.base} says no hidden_size: it makes no vectors of texts. Give another.")
        return width

    def model(self) -> Embedder:
        width = self._width
        bad = [size for size in self.sizes if not 0 < size < width]
        if bad:
            raise phalanx.WrongUse(
                f"sizes={bad[0]} is no part of a vector of {width} numbers. Set sizes from 1 to {width - 1}; the whole "
                "is always trained."
            )
        return embedder(self._config, self.pooling)

    def pretrained(self) -> Path | None:
        return None if self.small or self.base == TINY else local_folder(self.base)

    def write_along(self, folder: Path) -> None:
        """The tokenizer, and what sentence-transformers reads."""
        self._tokenizer.save_pretrained(folder)
        prompts = {"query": self.query_prompt, "document": self.text_prompt}
        describe(folder, Described(self._width, self.pooling, self.length, prompts))

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return list(self._tokenizer(texts, truncation=True, max_length=self.length)["input_ids"])

    @cached_property
    def _read(self) -> Read:
        return read(RowFile(self.path or HEALTH_SEARCH), self.bad_rows)

    @cached_property
    def _rows(self) -> SearchRows:
        check_length(self._config, self.length, f"base={self.base}")
        found = SearchRows(self._read.rows, self._encode, self.negatives, (self.query_prompt, self.text_prompt))
        words = vocabulary_of(self._config, f"base={self.base}")
        if found.largest >= words:
            raise phalanx.WrongUse(
                f"{self.path or HEALTH_SEARCH} has the token {found.largest}, and the model's vocabulary has "
                f"{words}. Use the model's own tokenizer."
            )
        return found

    def _part(self, held_out: bool) -> Any:
        rows = len(self._rows)
        if not self.share_held_out:
            return self._rows
        if not 0 < round(rows * self.share_held_out) < rows:
            raise phalanx.WrongUse(
                f"share_held_out={self.share_held_out} of {many(rows, 'row')} leaves one part empty. Set it to 0, or "
                "so that both parts have rows."
            )
        return split(self._rows, self.share_held_out)[held_out]

    def prepare(self) -> None:
        self.data()

    def data(self) -> Any:
        return self._part(held_out=False)

    def held_out(self) -> Any:
        return self._part(held_out=True) if self.share_held_out else None

    def overview(self) -> tuple[dict[str, str], list[str]]:
        """What became of the rows."""
        found, good, trained_on = self._read, len(self._rows), len(self._part(held_out=False))
        apart = {"left out": found.size - good, "held out": good - trained_on}
        parts = [f"{number:,} {what}" for what, number in apart.items() if number]
        negatives = many(self._rows.texts - 2, "hard negative")
        said = f"{trained_on:,} of {negatives} at most, the longest text has {many(self._rows.longest, 'token')}"
        notes = [f"left out: {found.left_out}"] if found.left_out else []
        if self._rows.longest == self.length:
            notes.append(f"texts of more than length={self.length} tokens are cut off")
        return {"rows": f"{found.size:,}: {', '.join([*parts, said])}"}, notes

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return padded_together(samples, self._pad)

    def inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": batch["tokens"], "lengths": batch["lengths"]}

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        """Of each query, how surely it tells its text from all others of the global batch, at each size of vectors."""
        queries, texts, ids = output[:, 0], phalanx.gather(output[:, 1:]), phalanx.gather(batch["ids"][:, 1:])
        own = phalanx.rows(output) * texts.shape[1]  # where the queries' own texts stand among all
        found, known = texts.flatten(0, 1), ids.flatten()
        alike = known == batch["ids"][:, 1:2]  # a text that is the same as one's own is no negative
        alike[torch.arange(len(own), device=own.device), own] = False
        absent = alike | (known == ABSENT)
        total = output.new_zeros(())
        for size in (output.shape[-1], *self.sizes):
            cosines = F.normalize(queries[:, :size], dim=-1) @ F.normalize(found[:, :size], dim=-1).T
            scores = (cosines / self.temperature).masked_fill(absent, -math.inf)
            total = total + F.cross_entropy(scores, own, reduction="sum")
        return phalanx.Loss(total, len(own))

    def evaluate(self, output: Tensor, batch: dict[str, Any]) -> dict[str, phalanx.Loss | Tensor]:
        return {"loss": self.loss(output, batch), "embeddings": output, "ids": batch["ids"]}

    def summarise(self, gathered: dict[str, Any]) -> dict[str, float]:
        """Each held-out query among all held-out texts."""
        embeddings, ids = gathered["embeddings"], gathered["ids"]
        found = retrieval(embeddings, ids)
        for size in self.sizes:
            found |= {f"{name}_of_{size}": value for name, value in retrieval(embeddings[..., :size], ids).items()}
        return found
