"""Attributes of modules and classes that are something else for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

Replace = Callable[[Any, str, Any], None]
"""``replace(owner, attribute, value)``"""


@contextmanager
def replacing() -> Iterator[Replace]:
    """What is replaced while this lasts is put back at its end, the last first."""
    with ExitStack() as stack:

        def replace(owner: Any, attribute: str, value: Any) -> None:
            stack.callback(setattr, owner, attribute, vars(owner)[attribute])
            setattr(owner, attribute, value)

        yield replace
