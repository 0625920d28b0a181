"""Training a task: ``phalanx.train(task, layout, on)`` from Python, or ``phalanx train`` in a shell."""

from __future__ import annotations

import sys
import types
from typing import Any


class _TrainRoom(types.ModuleType):
    """This room is called like the one thing it does, so it can be called."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from phalanx.train.from_python import train

        return train(*args, **options)


sys.modules[__name__].__class__ = _TrainRoom
