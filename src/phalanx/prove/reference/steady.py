"""What would make right layouts differ is taken out: casts to float32 inside a model, and choices between equals.

A model that casts to float32 somewhere rounds there by 1e-7, whatever the rest does: such casts stay in float64. And a
choice such as a router's, where two candidates are the same but for rounding, is made as the reference made it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx import user_code
from phalanx.parallel.randomness.draws import Randomness
from phalanx.prove.ranks.pieces import Piece
from phalanx.train.widened import NARROW

Answer = Callable[..., Any]


@dataclass(frozen=True)
class Idle:
    """A step in which the second half of the experts gets no token, so that some ranks' experts have nothing to do."""

    step: int
    experts: int

    @classmethod
    def of(cls, step: int, model: nn.Module, experts: Sequence[str]) -> Idle | None:
        """Without experts there is no such step."""
        counts = [getattr(model.get_submodule(name), "num_experts", 0) for name in experts]
        return cls(step, max(counts)) if any(counts) else None

    def without(self, scores: Any, chosen: int) -> Any:
        """A router's scores, which leave those experts out; so many it must choose."""
        if not isinstance(scores, Tensor) or scores.shape[-1:] != (self.experts,) or not scores.is_floating_point():
            return scores
        out = torch.arange(self.experts, device=scores.device) >= max(self.experts // 2, chosen)
        return scores.masked_fill(out, float("-inf"))


@dataclass
class Decisions:
    """What a reference chose: by step, scope and number, the indices, by the first slot of each micro-batch."""

    made: dict[tuple[int, str, int], dict[int, Tensor]] = field(default_factory=dict)
    lifted: int = 0
    """Casts that were left out."""
    idle: Idle | None = None
    resting: bool = False
    """What is computed is no step: its choices are its own."""

    def whole(self, step: int, scope: str, number: int) -> Tensor | None:
        parts = self.made.get((step, scope, number))
        return None if parts is None else torch.cat([parts[slot] for slot in sorted(parts)])

    def calls(self, step: int, scope: str) -> int:
        return sum(key[:2] == (step, scope) for key in self.made)


class Steady:
    """Answers a model's casts and choices."""

    def __init__(
        self,
        randomness: Randomness,
        decisions: Decisions,
        batch: Callable[[int], int],
        times: Callable[[], list[Tensor]] | None = None,
        *,
        wide: bool = True,
    ) -> None:
        """Without ``times``, which says what positions a rank may hold, choices are recorded.

        Casts are left out where the user's code, or a package's, asks for them. ``wide``: the model computes in
        float64, so whole numbers that it makes float32 become float64 as well; other dtypes have nearer ties.
        """
        self.randomness, self.decisions = randomness, decisions
        self.batch, self.times, self.wide, self.tie = batch, times, wide, 1e-9 if wide else 2**-6
        self._calls: Counter[tuple[int, int, str]] = Counter()
        casts: dict[Any, Answer] = {Tensor.to: self._to, Tensor.type: self._to}
        casts |= dict.fromkeys((Tensor.float, Tensor.half, Tensor.bfloat16), self._float)
        casts |= dict.fromkeys((F.softmax, torch.softmax, Tensor.softmax, F.log_softmax), self._softmax)
        casts[torch.full] = self._full
        choices: dict[Any, Answer] = dict.fromkeys((torch.topk, Tensor.topk, torch.argmax, Tensor.argmax), self._choose)
        self.answers: dict[Any, Answer] = choices | casts

    def _float(self, call: Answer, tensor: Any) -> Any:
        return self._lifted(tensor) if self._lifts(tensor) and user_code.asks() else call(tensor)

    def _to(self, call: Answer, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        narrow = [a for a in (*args, *kwargs.values()) if a in NARROW or (isinstance(a, Tensor) and a.dtype in NARROW)]
        if not self._lifts(tensor) or not narrow or not user_code.asks():
            return call(tensor, *args, **kwargs)
        rest = [a for a in args if not any(a is n for n in narrow)]
        named = {name: a for name, a in kwargs.items() if not any(a is n for n in narrow)}
        return call(self._lifted(tensor), *rest, **named) if rest or named else self._lifted(tensor)

    def _softmax(self, call: Answer, tensor: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
        if dtype in NARROW and self._lifts(tensor) and user_code.asks():
            self.decisions.lifted += 1
            dtype = None
        return call(tensor, *args, **kwargs | ({} if dtype is None else {"dtype": dtype}))

    def _full(self, call: Answer, size: Any, fill_value: Any, **kwargs: Any) -> Any:
        """Float64's least number, which masks are filled with, is too large for the default dtype."""
        most = torch.finfo(torch.get_default_dtype()).max
        too_large = isinstance(fill_value, float) and most < abs(fill_value) < math.inf
        if self.wide and too_large and kwargs.get("dtype") is None and user_code.asks():
            self.decisions.lifted += 1
            kwargs["dtype"] = torch.float64
        return call(size, fill_value, **kwargs)

    def _lifts(self, tensor: Any) -> bool:
        if not isinstance(tensor, Tensor):
            return False
        whole = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
        return tensor.dtype == torch.float64 or (self.wide and whole)

    def _lifted(self, tensor: Tensor) -> Tensor:
        self.decisions.lifted += 1
        return tensor.double()

    def _choose(self, call: Answer, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        idle = self.decisions.idle
        if idle is not None and self.randomness.moment.step == idle.step and not self.decisions.resting:
            tensor = idle.without(tensor, int(kwargs.get("k", args[0] if args else 1)))
        chosen = call(tensor, *args, **kwargs)
        if self.decisions.resting:
            return chosen
        indices = chosen[1] if isinstance(chosen, tuple) else chosen
        place = 1 if isinstance(chosen, tuple) else 0  # topk(k, dim), argmax(dim)
        dim = kwargs.get("dim", args[place] if len(args) > place else -1)
        last = dim in (-1, tensor.ndim - 1) if isinstance(tensor, Tensor) else False
        if not last or not tensor.is_floating_point() or indices.ndim != tensor.ndim:
            return chosen
        moment, scope = self.randomness.moment, self.randomness.name
        key = moment.step, int(moment.slots[0]), scope
        number, self._calls[key] = self._calls[key], self._calls[key] + 1
        if self.times is None:
            self.decisions.made.setdefault((moment.step, scope, number), {})[key[1]] = indices.detach().clone()
            return chosen
        number %= max(1, self.decisions.calls(moment.step, scope))  # a block may be computed again
        whole = self.decisions.whole(moment.step, scope, number)
        pair = (
            None if whole is None else Piece(indices, moment.slots, self.times()).beside(whole, self.batch(moment.step))
        )
        if pair is None or torch.equal(*pair) or not moment.real:
            return chosen
        wanted = pair[1].reshape(indices.shape)
        there, here = tensor.gather(-1, wanted), tensor.detach().gather(-1, indices)
        close = (there.detach() - here).abs() <= self.tie * here.abs().clamp_min(1e-30)
        if not bool(close.all()):
            return chosen  # no tie: what differs before it will be found
        return type(chosen)((there, wanted)) if isinstance(chosen, tuple) else wanted
