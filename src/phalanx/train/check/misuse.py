"""Functions of torch that are given what another one wants: they compute something, and it is not what was meant."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from phalanx.train.check import lines

RESHAPES = (
    "View", "ReshapeAlias", "UnsafeView", "Alias", "ToCopy", "Transpose", "T", "Permute", "Squeeze", "Unsqueeze",
)  # fmt: skip
DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout)
DETACHING = (Tensor.detach, Tensor.data.__get__, torch.tensor)  # type: ignore[attr-defined]
LOSSES = (F.cross_entropy, F.nll_loss, F.kl_div, F.binary_cross_entropy_with_logits)
CLOSE = 1e-2
"""How far probabilities may be from adding up to 1."""
FEW = 8
"""Targets that are what the model sees, if there are no more, may be so by chance."""


def _last(tensor: Tensor) -> str:
    """The function that a tensor is the result of, but for its shape and dtype."""
    function = tensor.grad_fn
    while function is not None and type(function).__name__.partition("Backward")[0] in RESHAPES:
        function = function.next_functions[0][0]
    return type(function).__name__ if function is not None else ""


class Misuse(TorchFunctionMode):
    """Notices it, while a loss is computed, or what is measured in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.detached = ""
        """The first line that takes something out of the graph."""
        self._looked_up: list[Tensor] = []
        self._targets: list[tuple[Tensor, str]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = args[0] if args else kwargs.get("input")
        if func in LOSSES and isinstance(given, Tensor):
            self._look(func, given)
            target = args[1] if len(args) > 1 else kwargs.get("target")
            if isinstance(target, Tensor) and not target.is_floating_point():
                self._targets.append((target.flatten(), lines.running()))
            elif isinstance(target, Tensor) and func is F.cross_entropy:
                self._look_at_probabilities(target)
        if func in DETACHING and not self.detached and isinstance(given, Tensor) and given.grad_fn is not None:
            self.detached = lines.running()
        if func is F.embedding and isinstance(given, Tensor):
            self._looked_up.append(given)
        return func(*args, **kwargs)

    def _look(self, func: Any, given: Tensor) -> None:
        last, name = _last(given), func.__name__
        if func is F.cross_entropy and last.startswith("SoftmaxBackward"):
            self._say(name, "probabilities, the result of a softmax", "Give it the scores before the softmax")
        elif func is F.cross_entropy and last.startswith("ReluBackward"):
            self._say(name, "the result of a relu, never below 0", "Leave that out after the last layer")
        elif func in (F.nll_loss, F.kl_div) and bool((given.detach() > 1e-6).any()):
            self._say(name, "numbers above 0, which are no log-probabilities", "Give it a log_softmax of the scores")
        elif func is F.binary_cross_entropy_with_logits and last.startswith("SigmoidBackward"):
            self._say(name, "probabilities, the result of a sigmoid", "Give it the scores before the sigmoid")

    def _look_at_probabilities(self, target: Tensor) -> None:
        """Whether they are of classes in another dim than torch takes them from."""
        classes = min(1, target.ndim - 1)
        dims = [dim for dim in reversed(range(target.ndim)) if bool(((target.sum(dim) - 1).abs() < CLOSE).all())]
        if dims and classes not in dims:
            other = -1 if dims[0] == target.ndim - 1 else dims[0]
            self._say(
                "cross_entropy", f"targets that add up to 1 over dim {other}, and not over dim {classes}",
                f"Write phalanx.losses.cross_entropy(output, targets, dim={other}) if the classes are there",
            )  # fmt: skip

    def _say(self, name: str, what: str, advice: str) -> None:
        text = f"{name} is given {what}{lines.at(lines.running())}: it would learn slowly or wrongly. {advice}."
        if text not in self.found:
            self.found.append(text)

    def check_targets(self) -> None:
        """Whether a model is asked for what it looks up: a language model whose targets are not shifted."""
        for target, line in self._targets:
            for given in self._looked_up:
                if given.ndim < 2 or given.numel() != target.numel():
                    continue
                asked = target >= 0
                if int(asked.sum()) > FEW and torch.equal(given.flatten()[asked], target[asked]):
                    self.found.append(
                        f"each target is the id that the model gets at the same place{lines.at(line)}: it learns to "
                        "repeat what it sees. To predict the next one, compare output[:, :-1] with ids[:, 1:]."
                    )
                    return


class DropoutLeftOn(TorchFunctionMode):
    """Notices dropout in a model that is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.line: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DROPOUTS and self.line is None:
            asked = inspect.signature(func).bind(*args, **kwargs)
            asked.apply_defaults()
            if asked.arguments["p"] > 0 and asked.arguments["training"]:
                self.line = lines.running()
        return func(*args, **kwargs)

    @property
    def found(self) -> list[str]:
        if self.line is None:
            return []
        return [
            f"dropout stays on in evaluation{lines.at(self.line)}: what is measured on held-out data is too bad. Use "
            "nn.Dropout, or say F.dropout(x, p, training=self.training)."
        ]
