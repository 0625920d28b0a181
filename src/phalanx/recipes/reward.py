"""A reward model: a language model of Hugging Face's with one number as its output learns which answers are better."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

import phalanx
from phalanx import configs
from phalanx.errors import WrongUse
from phalanx.recipes.preferring import Preferring

HEADS = ("score", "classifier", "classification_head")
"""What Hugging Face's sequence classifiers call theirs."""


@dataclass
class Reward(Preferring):
    """Give the better of two answers the higher number (Bradley-Terry)."""

    learning_rate: float = 1e-5
    center: float = 0.0
    """What squared sums of both rewards are multiplied with, so that rewards stay around 0."""

    def check(self) -> None:
        super().check()
        if not 0 <= self.center < float("inf"):
            raise WrongUse(f"center={self.center} is no weight. Set it to a number from 0 up, such as 0.01.")

    def tiny(self) -> Reward:
        """The same kind of model and task at small sizes, on the shipped rows."""
        return dataclasses.replace(self, **self.made_small())

    def model(self) -> nn.Module:
        model = self.tuned("scoring")
        for name, weight in model.named_parameters():
            if self._is_heads(name):
                weight.requires_grad_()  # beside LoRA, too
        return model

    @property
    def _config(self) -> Any:
        """The last token of a sequence is found by what it is padded with."""
        config = super()._config
        config.pad_token_id = configs.text(config).pad_token_id = self._pad
        return config

    def _is_heads(self, weight: str) -> bool:
        return weight.partition(".")[0] in HEADS

    def added(self, weight: str) -> bool:
        """Where the base is no classifier yet, its head is new."""
        kinds = configs.named_classes(self._config)
        new = not any(kind.endswith("ForSequenceClassification") for kind in kinds)
        return super().added(weight) or (new and self._is_heads(weight))

    def loss(self, output: Any, batch: dict[str, Any]) -> phalanx.Loss:
        measures = self.evaluate(output, batch)
        for name in ("accuracy", "margin"):
            phalanx.log(f"rewards/{name}", measures[name])
        return measures["loss"]

    def evaluate(self, output: Any, batch: dict[str, Any]) -> Mapping[str, phalanx.Loss]:
        """The loss, and how often and by how much the better answer's reward is higher."""
        rewards = _rewards(output)
        margins = rewards[:, 0] - rewards[:, 1]
        losses = -F.logsigmoid(margins)
        if self.center:
            losses = losses + self.center * rewards.sum(1).square()
        found, size = margins.detach(), len(margins)
        return {
            "loss": phalanx.Loss(losses.sum(), size),
            "accuracy": phalanx.Loss((found > 0).to(found.dtype).sum(), size),
            "margin": phalanx.Loss(found.sum(), size),
        }


def _rewards(output: Any) -> Tensor:
    """``[batch, 2]``, of the better answers and of the worse ones."""
    logits: Tensor = output.logits
    if logits.ndim != 2 or logits.shape[1] != 1:
        raise WrongUse(f"the model gives {tuple(logits.shape)}, not a number for each sequence. Set another base.")
    return logits.float().view(-1, 2) if logits.dtype.itemsize < 4 else logits.view(-1, 2)
