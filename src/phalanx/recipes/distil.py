"""Distillation: a small language model of Hugging Face's learns to predict as a larger one does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from torch import nn

import phalanx
from phalanx.models.beside import anatomy_beside, put_beside
from phalanx.models.hugging_face import check_apart, configuration, language_model, local_folder, vocabulary_of
from phalanx.recipes.fine_tuning import TINY
from phalanx.recipes.sft import SFT

Divergence = Literal["forward", "reverse"]
TEACHER = "teacher"


@dataclass
class Distil(SFT):
    """Learn a teacher's predictions of the answers of a file of conversations."""

    teacher: str = TINY
    """A folder with a model, its name, or ``tiny``: a Llama twice as wide, without any training."""
    divergence: Divergence = "forward"
    """KL(teacher || student), or ``reverse``: KL(student || teacher)."""
    temperature: float = 1.0
    """What both models' logits are divided by; the divergence is multiplied with its square."""
    mix: float = 0.5
    """The share of the divergence in the loss; the rest is the cross-entropy of the answers."""

    def check(self) -> None:
        super().check()
        if self.divergence not in get_args(Divergence):
            raise phalanx.WrongUse(f"divergence={self.divergence!r} is not known. Choose forward or reverse.")
        if not 0 < self.temperature < math.inf:
            raise phalanx.WrongUse(f"temperature={self.temperature} divides nothing. Set it above 0, such as 2.")
        if not 0 < self.mix <= 1:
            raise phalanx.WrongUse(f"mix={self.mix} is no share of the divergence. Set it above 0, up to 1.")

    @cached_property
    def _teachers(self) -> Any:
        """The teacher's configuration."""
        if self.teacher != TINY:
            return self.made_smaller(configuration(local_folder(self.teacher)))
        found = self.tiny_config()
        found.hidden_size, found.intermediate_size = 2 * found.hidden_size, 2 * found.intermediate_size
        found.head_dim = found.hidden_size // found.num_attention_heads
        return self.made_smaller(found)

    def model(self) -> nn.Module:
        model, teacher = super().model(), language_model(self._teachers, "causal")
        sizes = [
            vocabulary_of(self._config, f"base={self.base}"), vocabulary_of(self._teachers, f"teacher={self.teacher}"),
        ]  # fmt: skip
        if sizes[0] != sizes[1]:
            raise phalanx.WrongUse(
                f"base={self.base} has a vocabulary of {sizes[0]:,} and teacher={self.teacher} one of {sizes[1]:,}. "
                "Choose two models of one family, with one tokenizer."
            )
        if self.packed:
            check_apart(teacher, "conversations", "Set packed=false: each is a sample.")
        put_beside(model, TEACHER, teacher)
        return model

    def pretrained(self) -> Path | Mapping[str, Path] | None:
        own = super().pretrained()
        if self.small or self.teacher == TINY:
            return own
        assert own is None or isinstance(own, Path)
        return {f"{TEACHER}.": local_folder(self.teacher)} | ({} if own is None else {"": own})

    def anatomy(self, model: nn.Module) -> phalanx.Anatomy:
        return anatomy_beside(model, TEACHER)

    def loss(self, output: Any, batch: dict[str, Any]) -> phalanx.Loss:
        measures = self.evaluate(output, batch)
        factor = self.mix * self.temperature**2
        if self.mix == 1:
            return measures["divergence"] * factor
        return phalanx.losses.sum(
            divergence=measures["divergence"] * factor, cross_entropy=measures["cross_entropy"] * (1 - self.mix)
        )

    def evaluate(self, output: Any, batch: dict[str, Any]) -> dict[str, phalanx.Loss]:
        """Both parts of the loss, without what they are multiplied with."""
        own, targets = output["logits"], batch["targets"]
        apart = phalanx.losses.divergence(
            own, output[TEACHER], targets >= 0, reverse=self.divergence == "reverse", temperature=self.temperature
        )
        return {"divergence": apart, "cross_entropy": phalanx.losses.cross_entropy(own, targets, dim=-1)}
