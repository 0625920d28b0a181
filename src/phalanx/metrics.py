"""What a task logs of its own while it trains: ``phalanx.log("accuracy", right.float().mean())``.

It may be called in ``Task.inputs``, in ``Task.loss`` and in the model's forward. What is logged in a step is reported
as one mean over the global batch, at any number of ranks and micro-batches. Outside of a training step nothing is done.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any

from torch import Tensor

from phalanx.errors import WrongUse
from phalanx.loss import Loss

Number = Tensor | float
Taker = Callable[[str, Number | Loss, Number | None], None]
"""Is given a name, a value, and the weight of it; None: as many as the micro-batch has samples, or as a sum counts."""
OURS = (
    "step", "loss", "grad_norm", "clip_factor", "lr", "skipped", "samples_per_second", "tokens_per_second",
    "memory_gib",
)  # fmt: skip
"""Names under which a step's own numbers stand beside those that are logged, in loggers too (`watch.loggers`)."""
LONGEST = 100
NAME = re.compile(r"\w[\w .-]*(/\w[\w .-]*)*")
_taker: Taker | None = None
_known: set[str] = set()


@contextmanager
def logged_by(taker: Taker) -> Iterator[None]:
    """Meanwhile what is logged is given to this."""
    global _taker
    outer, _taker = _taker, taker
    try:
        yield
    finally:
        _taker = outer


def log(name: str, value: Number | Loss, count: Number | None = None) -> None:
    """Report a number of this micro-batch with the step's metrics, as a mean over the global batch.

    Each value weighs as much as its micro-batch has samples; ``count``: or so much, such as how many tokens it is the
    mean of. ``phalanx.Loss(total, count)`` is a sum, and how many terms it has.
    """
    if name not in _known:
        check_name(name)
        _known.add(name)
    if isinstance(value, Loss):
        if count is not None or value.count is None:
            raise WrongUse(f"phalanx.log({name!r}) got a Loss, whose own count is its weight. Give it there, and once.")
        _check_number(name, "total", value.total)
        _check_count(name, value.count)
    else:
        _check_number(name, "value", value)
        if count is not None:
            _check_count(name, count)
    if _taker is not None:
        _taker(name, value, count)


def check_name(name: Any) -> None:
    """Refuse a name that some place to log to cannot have, or that is a step's own."""
    if not isinstance(name, str):
        raise WrongUse(f"phalanx.log got a {type(name).__name__} as a name. Write phalanx.log('accuracy', value).")
    if len(name) > LONGEST or not NAME.fullmatch(name) or name != name.strip():
        raise WrongUse(
            f"phalanx.log({name[:LONGEST]!r}) is no name. Use letters, digits, '_', '-', '.', spaces, and '/' between "
            f"parts, up to {LONGEST} characters, such as 'accuracy' or 'attention/entropy'."
        )
    if name in OURS or name.startswith(("loss/", "seconds/")):
        raise WrongUse(f"phalanx.log({name!r}) has the name of one of the step's own numbers. Give it another.")


def _check_number(name: str, what: str, value: Any) -> None:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise WrongUse(
                f"phalanx.log({name!r}) got a {what} of shape {tuple(value.shape)}, and logs one number. Take its "
                "mean(), or give phalanx.Loss(total, count)."
            )
        if value.is_complex():
            raise WrongUse(f"phalanx.log({name!r}) got a complex {what}. Take its abs(), its real or its imag.")
    elif not isinstance(value, Real):
        raise WrongUse(f"phalanx.log({name!r}) got a {type(value).__name__} as its {what}. Give a number or a tensor.")


def _check_count(name: str, count: Any) -> None:
    _check_number(name, "count", count)
    if not isinstance(count, Tensor) and not 0 <= count < math.inf:
        raise WrongUse(f"phalanx.log({name!r}) got a count of {count}, which is no weight. Give a number from 0 up.")


def refused(who: str) -> Taker:
    """For moments at which nothing can be logged: says so."""

    def refuse(name: str, value: Number | Loss, count: Number | None) -> None:
        raise WrongUse(
            f"phalanx.log({name!r}) in {who} is not of a micro-batch, and would be in no mean. Call it in Task.inputs, "
            "Task.loss or the model's forward."
        )

    return refuse
