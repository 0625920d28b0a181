"""What recipes that learn from preferences have in common: rows with a better and a worse answer, as samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from phalanx import configs
from phalanx.data.chat import Chat
from phalanx.data.compared import Compared, Judgements, stacked
from phalanx.data.preferences import PreferenceReader, Preferences, pairs
from phalanx.data.row_file import RowFile
from phalanx.data.splitting import split
from phalanx.errors import WrongUse
from phalanx.models.hugging_face import check_length, vocabulary_of
from phalanx.recipes.fine_tuning import FineTuning
from phalanx.words import many

PREFERENCES = Path(__file__).parent / "data" / "preferences.jsonl"
"""Questions about health, each with a sound answer and an unsound one: short, general, written for these recipes."""


@dataclass
class Preferring(FineTuning):
    """Samples of two sequences each, made of a file's rows. Nothing is dropped: differences of answers are compared."""

    def check(self) -> None:
        super().check()
        if self.lora_dropout:
            raise WrongUse(
                f"lora_dropout={self.lora_dropout} would differ from answer to answer of a pair, which are compared. "
                "Leave it out."
            )

    @cached_property
    def _config(self) -> Any:
        """The base's, without dropout."""
        config = super()._config
        for own in configs.with_parts(config):
            for name, value in list(vars(own).items()):
                if isinstance(value, float) and ("dropout" in name or "pdrop" in name):
                    setattr(own, name, 0.0)
        return config

    @cached_property
    def _preferences(self) -> Preferences:
        return self.read(RowFile(self.path or PREFERENCES), self._reader)

    def read(self, rows: RowFile, reader: PreferenceReader) -> Preferences:
        """The rows as answers: by default as pairs."""
        return pairs(rows, reader, self.bad_rows)

    @cached_property
    def _reader(self) -> PreferenceReader:
        check_length(self._config, self.length, f"base={self.base}")
        words = vocabulary_of(self._config, f"base={self.base}")
        return PreferenceReader(Chat(self._tokenizer, "answers", self.marks), self.length, words)

    def samples(self, answers: Sequence[Any]) -> Compared | Judgements:
        """A data set of some answers: by default of pairs."""
        return Compared(answers, self._pad)

    def _part(self, held_out: bool) -> list[Any]:
        """Rows of which both answers are on one side."""
        answers: list[Any] = list(self._preferences.answers)
        if self.share_held_out:
            self._check_share(len(answers))
            part = split(answers, self.share_held_out)[held_out]
            answers = [part[index] for index in range(len(part))]
        return answers

    @cached_property
    def _training(self) -> Compared | Judgements:
        return self.samples(self._part(held_out=False))

    def data(self) -> Any:
        return self.by_length(self._training, self._training.lengths)

    def held_out(self) -> Compared | Judgements | None:
        return self.samples(self._part(held_out=True)) if self.share_held_out else None

    def overview(self) -> tuple[dict[str, str], list[str]]:
        """What became of the rows."""
        found, path = self._preferences, self.path or PREFERENCES
        held = len(found.answers) - len(self._part(held_out=False))
        parts = [f"{held:,} held out"] if held else []
        notes = [f"left out: {found.left_out}"] if found.left_out else []
        if found.cut:
            notes.append(f"{many(found.cut, 'answer')} of {path} cut off at length={self.length} tokens")
        return {"rows": f"{found.rows:,}: {', '.join([*parts, self._training.describe()])}"}, notes

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return stacked(samples, self._pad)

    def inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Both sequences of a sample one after the other, ``[2 * batch, time]``."""
        tokens: Tensor = batch["tokens"]
        return {"input_ids": tokens.flatten(0, 1)}
