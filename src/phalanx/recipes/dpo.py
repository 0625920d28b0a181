"""Preference tuning: a causal language model of Hugging Face's learns which answers are preferred."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

import phalanx
from phalanx.data.compared import Compared, Judgements
from phalanx.data.preferences import PreferenceReader, Preferences, apart, judgements
from phalanx.data.row_file import RowFile
from phalanx.models.beside import anatomy_beside, put_beside
from phalanx.models.hugging_face import language_model
from phalanx.recipes.preferring import Preferring

Method = Literal["dpo", "ipo", "kto", "simpo"]
Where = Literal["once", "beside"]
BESIDE = "reference"
Measures = dict[str, phalanx.Loss]


@dataclass
class DPO(Preferring):
    """Prefer the better of two answers; with ``method=kto``, good answers to bad ones."""

    method: Method = "dpo"
    beta: float = 0.1
    """How strongly what is learned is held to the reference; of ``simpo``, what a reward is multiplied with."""
    reference: Where = "once"
    """Log-probabilities of the model as it begins: computed ``once``, or by a frozen one kept ``beside`` it."""
    label_smoothing: float = 0.0
    """How likely it is that a row has its answers the wrong way round."""
    gamma: float = 0.5
    """Of ``simpo``: by how much the better answer's reward shall be higher."""
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    """Of ``kto``: what losses of good answers and of bad ones are multiplied with."""
    learning_rate: float = 1e-5

    def check(self) -> None:
        super().check()
        for name, kind in (("method", Method), ("reference", Where)):
            if getattr(self, name) not in get_args(kind):
                known = ", ".join(get_args(kind))
                raise phalanx.WrongUse(f"{name}={getattr(self, name)!r} is not known. Choose one of: {known}.")
        if not 0 < self.beta < math.inf:
            raise phalanx.WrongUse(f"beta={self.beta} is no factor. Set it above 0, such as 0.1.")
        if not 0 <= self.label_smoothing < 0.5:
            raise phalanx.WrongUse(f"label_smoothing={self.label_smoothing} is no share below one half. Set it to 0.")
        of = {
            "reference": ("dpo", "ipo", "kto"), "label_smoothing": ("dpo", "simpo"), "gamma": ("simpo",),
            "desirable_weight": ("kto",), "undesirable_weight": ("kto",),
        }  # fmt: skip
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name, methods in of.items():
            if getattr(self, name) != defaults[name] and self.method not in methods:
                raise phalanx.WrongUse(
                    f"{name} would have no effect with method={self.method}. Leave it out, or set method={methods[0]}."
                )
        for name in ("desirable_weight", "undesirable_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise phalanx.WrongUse(f"{name}={getattr(self, name)} is no weight. Set it to a number from 0 up.")
        if self.adapter:
            raise phalanx.WrongUse(
                f"adapter={self.adapter} would have to be a part of the reference, which is the model without "
                "adapters. Merge it into its base first: peft's merge_and_unload(), or phalanx export --merge."
            )

    def tiny(self) -> DPO:
        """The same kind of model and task at small sizes, on the shipped rows."""
        return dataclasses.replace(self, **self.made_small())

    @property
    def _beside(self) -> bool:
        return self.reference == "beside" and self.method != "simpo"

    def model(self) -> nn.Module:
        if not self._beside:
            return self.tuned("causal")
        model = language_model(self._config, "causal")
        frozen = copy.deepcopy(model)
        tuned = self.with_lora(model)
        put_beside(tuned, BESIDE, frozen)
        return tuned

    def anatomy(self, model: nn.Module) -> phalanx.Anatomy:
        return anatomy_beside(model, BESIDE) if self._beside else super().anatomy(model)

    def pretrained(self) -> Path | Mapping[str, Path] | None:
        own = super().pretrained()
        return {"": own, f"{BESIDE}.": own} if self._beside and isinstance(own, Path) else own

    def read(self, rows: RowFile, reader: PreferenceReader) -> Preferences:
        return judgements(rows, reader, self.bad_rows) if self.method == "kto" else super().read(rows, reader)

    def samples(self, answers: Sequence[Any]) -> Compared | Judgements:
        return Judgements(apart(answers), self.length, self._pad) if self.method == "kto" else super().samples(answers)

    def beforehand(self) -> Callable[[Any, dict[str, Any]], Mapping[str, Tensor]] | None:
        """The reference is the model as it is before the first step."""
        return None if self.method == "simpo" or self._beside else self._known

    def _known(self, output: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
        return {"reference": log_probs(output["logits"], batch)}

    def loss(self, output: Any, batch: dict[str, Any]) -> phalanx.Loss:
        measures = self.evaluate(output, batch)
        for name, measure in measures.items():
            if name != "loss":
                phalanx.log(f"rewards/{name}", measure)
        return measures["loss"]

    def evaluate(self, output: Any, batch: dict[str, Any]) -> Measures:
        """The loss, and what rewards say: how often and by how much the better answer's is higher."""
        own = log_probs(output["logits"], batch)
        if self.method == "simpo":
            return self._compared(own / lengths(batch), self.gamma)
        ratios = own - self._reference(own, output, batch)
        if self.method == "kto":
            return self._judged(ratios, batch["good"])
        return self._normalised(ratios, batch) if self.method == "ipo" else self._compared(ratios, 0.0)

    def _reference(self, own: Tensor, output: Any, batch: dict[str, Any]) -> Tensor:
        if self._beside:
            return log_probs(output[BESIDE], batch).detach()
        # before the first step the model itself is the reference
        return batch["reference"] if "reference" in batch else own.detach()

    def _compared(self, scores: Tensor, margin: float) -> Measures:
        """``scores``, ``[batch, 2]``, of the better answers and of the worse ones."""
        logits = self.beta * (scores[:, 0] - scores[:, 1]) - margin
        losses = -(1 - self.label_smoothing) * F.logsigmoid(logits)
        if self.label_smoothing:
            losses = losses - self.label_smoothing * F.logsigmoid(-logits)
        return _measures(losses, self.beta * scores)

    def _normalised(self, ratios: Tensor, batch: dict[str, Any]) -> Measures:
        """Of tokens, not of whole answers."""
        each = ratios / lengths(batch)
        return _measures((each[:, 0] - each[:, 1] - 1 / (2 * self.beta)).square(), self.beta * ratios)

    def _judged(self, ratios: Tensor, good: Tensor) -> Measures:
        """Rewards are held against the mean of mismatched answers in the global batch, if that is above 0."""
        bar = phalanx.gather(ratios[:, 1].detach()).mean().clamp(min=0)
        above = self.beta * (ratios[:, 0] - bar)
        weights = self.desirable_weight * good + self.undesirable_weight * (1 - good)
        losses = weights * (1 - F.sigmoid(above * (2 * good - 1)))
        rewards = (self.beta * ratios[:, 0]).detach()
        right = ((above.detach() > 0) == (good > 0)).to(rewards.dtype)
        return {
            "loss": phalanx.Loss(losses.sum(), len(losses)),
            "accuracy": phalanx.Loss(right.sum(), len(right)),
            "chosen": phalanx.Loss((rewards * good).sum(), good.sum()),
            "rejected": phalanx.Loss((rewards * (1 - good)).sum(), (1 - good).sum()),
        }


def log_probs(logits: Tensor | phalanx.Logits, batch: dict[str, Any]) -> Tensor:
    """Of both sequences of each sample, ``[batch, 2]``: the log-probability of the answer."""
    targets: Tensor = batch["targets"]
    return phalanx.losses.log_probs(logits, targets.flatten(0, 1)).view(-1, 2)


def lengths(batch: dict[str, Any]) -> Tensor:
    """Of both sequences of each sample: how many tokens the answer has."""
    return (batch["targets"] >= 0).sum(-1)


def _measures(losses: Tensor, rewards: Tensor) -> Measures:
    """``rewards``, ``[batch, 2]``, of the better answers and of the worse ones."""
    margins = (rewards[:, 0] - rewards[:, 1]).detach()
    right, size = (margins > 0).to(margins.dtype), len(margins)
    return {
        "loss": phalanx.Loss(losses.sum(), size),
        "accuracy": phalanx.Loss(right.sum(), size),
        "margin": phalanx.Loss(margins.sum(), size),
    }
