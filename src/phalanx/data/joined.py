"""A data set whose samples have more columns, known by their number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class JoinedSamples:
    """Samples as they are, each with its rows of some tensors; anything else is asked of the data set itself."""

    def __init__(self, data: Any, columns: Mapping[str, Tensor]) -> None:
        self._joined = data, dict(columns)

    def __len__(self) -> int:
        return len(self._joined[0])

    def __getitem__(self, index: int) -> dict[str, Any]:
        data, columns = self._joined
        return {**data[index], **{name: column[index] for name, column in columns.items()}}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._joined[0], name)


def apart(data: Any) -> Any:
    """A data set without what was joined to it."""
    return data._joined[0] if isinstance(data, JoinedSamples) else data
