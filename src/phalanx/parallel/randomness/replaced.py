"""Random functions answered by keyed draws where blocks are compiled: a compiler traces through no function mode.

They are replaced where models look them up, in ``torch.nn.functional``, which modules and attention of torch's own do
too. What is looked up elsewhere, as ``torch.rand``, is not answered, and refused if it draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F

from phalanx.parallel.randomness.answers import ANSWERS
from phalanx.parallel.randomness.draws import Randomness

DRAWING = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.gumbel_softmax, F.scaled_dot_product_attention)

Function = Callable[..., Any]


class ReplacedAnswers:
    """What `Answers` is without a compiler: entered while a micro-batch is computed."""

    def __init__(self, randomness: Randomness, before: Mapping[Any, Function] | None = None) -> None:
        """``before``: functions that a parallelism answers first, as of `Answers`."""
        first = dict(before or {})
        randomness.asked |= bool(first)
        self._plain = {func.__name__: func for func in dict.fromkeys([*DRAWING, *first])}
        self._instead = {
            name: _answer(randomness, func, first.get(func)) for name, func in self._plain.items()
        }  # one object each: programs are compiled for it

    def __enter__(self) -> None:
        """What somebody has put in torch's place is left there."""
        own = [name for name, plain in self._plain.items() if vars(F)[name] is plain]
        self._found = {name: self._plain[name] for name in own}
        vars(F).update({name: self._instead[name] for name in own})

    def __exit__(self, *error: object) -> None:
        vars(F).update(self._found)


def _answer(randomness: Randomness, func: Function, first: Function | None) -> Function:
    answer = ANSWERS.get(func)

    def drawn(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs) if answer is None else answer(randomness, func, *args, **kwargs)

    def answered(*args: Any, **kwargs: Any) -> Any:
        return drawn(*args, **kwargs) if first is None else first(drawn, *args, **kwargs)

    return answered
