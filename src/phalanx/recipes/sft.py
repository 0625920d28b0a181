"""Supervised fine-tuning: a causal language model of Hugging Face's learns to answer as the rows of a file do."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

import phalanx
from phalanx.data.asked import LastQuestions, asked
from phalanx.data.chat import Chat, LossOn
from phalanx.data.encoded_rows import encoded_once
from phalanx.data.row_file import RowFile
from phalanx.data.splitting import split
from phalanx.data.supervised import Encoded, Supervised, padded_together
from phalanx.models.hugging_face import check_apart, check_length, vocabulary_of
from phalanx.questions import Questions
from phalanx.recipes.fine_tuning import HEALTH, FineTuning
from phalanx.words import many


@dataclass
class SFT(FineTuning):
    """Learn the answers of a file of conversations."""

    packed: bool = True
    """Several conversations a sample, as many as fit; otherwise each is one, padded."""
    loss_on: LossOn = "answers"
    cache: str = ""
    """A folder for encoded rows; by default in the user's own for such things."""
    answers: int = 3
    """At each evaluation, so many held-out questions are answered, in a file of the run's folder."""

    counts = "tokens"

    def check(self) -> None:
        super().check()
        if self.answers < 0:
            raise phalanx.WrongUse(f"answers={self.answers} is no number of answers. Set it to 0 or more.")
        if self.packed and (self.group_by_length or self.batch_tokens):
            name = "group_by_length" if self.group_by_length else "batch_tokens"
            raise phalanx.WrongUse(
                f"{name} has no effect on packed samples, which all have one length. Set packed=false."
            )

    def tiny(self) -> SFT:
        """The same kind of model and task at small sizes, on the shipped rows."""
        return dataclasses.replace(self, **self.made_small())

    def model(self) -> nn.Module:
        model = self.tuned("causal")
        if self.packed:
            check_apart(model, "conversations", "Set packed=false: each is a sample.")
        return model

    @cached_property
    def _encoded(self) -> Encoded:
        check_length(self._config, self.length, f"base={self.base}")
        chat = Chat(self._tokenizer, self.loss_on, self.marks)
        known = os.environ.get("XDG_CACHE_HOME")
        cache = Path(self.cache) if self.cache else Path(known or Path.home() / ".cache") / "phalanx" / "rows"
        rows, words = RowFile(self.path or HEALTH), vocabulary_of(self._config, f"base={self.base}")
        return encoded_once(rows, chat, self.length, words, self.bad_rows, cache)

    def _samples(self, held_out: bool) -> Supervised:
        documents = [self._encoded.documents[number] for number in self._part(held_out)]
        return Supervised(documents, self.length if self.packed else None, self._pad)

    def _part(self, held_out: bool) -> list[int]:
        """Which documents are trained on, or held out."""
        every = range(len(self._encoded.documents))
        if not self.share_held_out:
            return [*every]
        self._check_share(len(every))
        part = split(every, self.share_held_out)[held_out]
        return [part[index] for index in range(len(part))]

    @cached_property
    def _training(self) -> Supervised:
        return self._samples(held_out=False)

    def data(self) -> Any:
        return self.by_length(self._training, lambda: [len(ids) for ids, _ in self._training.documents])

    @cached_property
    def _aside(self) -> Supervised | None:
        return self._samples(held_out=True) if self.share_held_out else None

    def held_out(self) -> Supervised | None:
        return self._aside

    @cached_property
    def _questions(self) -> Questions | None:
        if self._aside is None:
            return None
        rows = [self._encoded.kept[number] for number in self._part(held_out=True)]
        words = LastQuestions(self.path or HEALTH, rows)
        return asked(self._aside.documents, self._tokenizer, self.length, self._pad, self.answers, words)

    def questions(self) -> Questions | None:
        return self._questions

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
        return phalanx.losses.cross_entropy(output.logits, batch["targets"], dim=-1)
