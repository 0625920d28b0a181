"""Which checkpoint is the best by a measure of the held-out data: a small file beside the checkpoints."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

from phalanx.checkpoint.manifest import Damaged
from phalanx.checkpoint.store import Store

BEST = "best.json"


@dataclass(frozen=True)
class Best:
    """A checkpoint by its step, the measure that it is the best at, and that measure's value."""

    step: int
    measure: str
    value: float

    def __str__(self) -> str:
        return f"step {self.step}, with the best {self.measure}, {self.value:.6g}"


def read_best(store: Store) -> Best | None:
    """The best checkpoint as it was noted last; None if none was."""
    if not store.exists(BEST):
        return None
    try:
        found = Best(**json.loads(store.read(BEST)))
        sane = isinstance(found.step, int) and found.step > 0 and isinstance(found.measure, str)
        if not (sane and math.isfinite(found.value)):
            raise ValueError
    except (ValueError, TypeError):
        raise Damaged(f"{store.url}/{BEST}", "does not name a checkpoint") from None
    return found


def write_best(store: Store, best: Best) -> None:
    """Note which checkpoint is the best."""
    with store.write(BEST) as file:
        file.write(json.dumps(asdict(best)).encode())
