"""Proving that a layout trains like one device: ``phalanx.prove(task, layouts)``, or ``phalanx prove`` in a shell."""

from __future__ import annotations

import sys
import types
from typing import Any


class _Room(types.ModuleType):
    """This room is called like the one thing it does, so it can be called."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from phalanx.prove.proof import prove

        return prove(*args, **options)


sys.modules[__name__].__class__ = _Room
