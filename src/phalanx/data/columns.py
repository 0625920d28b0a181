"""A column of all samples of a data set, without reading the samples: the classes that ``balance`` names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch.utils.data import Subset

from phalanx.errors import WrongUse, closest


def column_of(data: Any, name: str) -> Any:
    """The values of a column, one for each sample.

    A data set gives them by a method ``column(name)``, as ours do. Of lists of samples, of parts of a data set and of
    Hugging Face's data sets they are known without it.
    """
    if callable(own := getattr(data, "column", None)):
        return own(name)
    if isinstance(data, Subset):
        return np.asarray(column_of(data.dataset, name))[np.asarray(data.indices)]
    if isinstance(data, (list, tuple)) and all(isinstance(sample, Mapping) for sample in data):
        for sample in data:
            if name not in sample:
                raise no_column(name, sample)
        return np.array([np.asarray(sample[name]) for sample in data])
    if hasattr(data, "column_names") and hasattr(data, "with_format"):  # Hugging Face's
        if name not in data.column_names:
            raise no_column(name, data.column_names)
        return np.asarray(data.with_format("numpy")[name])
    raise WrongUse(
        f"balance={name} needs the classes of all samples before the first step, and a {type(data).__name__} gives one "
        "sample at a time. Give its class a method column(self, name) that returns a list or an array with a value for "
        "each sample, or the task a sample_weights(self, data)."
    )


def no_column(name: str, known: Any) -> WrongUse:
    """For a column that samples do not have."""
    return WrongUse(f"the samples have no column {name!r}; {closest(name, known)}")
