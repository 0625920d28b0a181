"""What people return for data and what it should be: each mistaken kind is named, with the line to write instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset

from phalanx.errors import WrongUse
from phalanx.traces import described
from phalanx.words import many

SAMPLES = "Return something with len() and [i] -> dict of tensors or numbers"
SHOWN = 4


class BrokenStream(WrongUse):
    """Why samples cannot be read from here on: none of them can be left out as bad."""


def count_samples(data: Any, name: str) -> int:
    """How many samples a data set has; what is none is refused. ``name``: the method that returned it."""
    if wrong := _mistaken(data):
        raise WrongUse(f"{name} returned {wrong}")
    try:
        size = len(data)
    except TypeError:
        raise WrongUse(
            f"{name} returned a {type(data).__name__}, which has no len(): which sample is in which step follows from "
            f"the seed, so there must be a number of them. {SAMPLES}, such as a list."
        ) from None
    if not size:
        instead = ", or return None" if name.endswith("held_out") else ""
        raise WrongUse(f"{name} is empty: its len() is 0. Check the path or the filter that it comes from{instead}.")
    if not hasattr(data, "__getitem__"):
        raise WrongUse(f"{name} returned a {type(data).__name__}, which has no [i]. {SAMPLES}, such as a list.")
    return size


def length(data: Any, method: str, task: object) -> int:
    """How many samples the data set has that a method of a task gave."""
    return count_samples(data, f"{type(task).__name__}.{method}")


def _mistaken(data: Any) -> str:
    """What is wrong with a kind of data that is known not to work, and the line to write; nothing, mostly."""
    kind = type(data).__name__
    if data is None:
        return f"nothing. {SAMPLES}."
    if isinstance(data, Mapping):
        if all(hasattr(value, "features") for value in data.values()) and data:  # Hugging Face's DatasetDict
            split = "train" if "train" in data else str(next(iter(data)))
            return f'a {kind} of {_listed(data)}. Return one of them: return data["{split}"].with_format("torch")'
        columns = ", ".join(f'{name}=columns["{name}"]' for name in list(data)[:SHOWN])
        return f"a dict of columns, where [i] is no sample. Write: return phalanx.data.Arrays({columns})"
    if kind == "DataFrame":
        columns = ", ".join(f'{name}=frame["{name}"].to_numpy()' for name in list(data.columns)[:SHOWN])
        return f"a DataFrame, whose [i] is a column. Write: return phalanx.data.Arrays({columns})"
    if isinstance(data, (IterableDataset, Iterator)):
        return (
            f"a {kind}, a stream: which sample is in which step follows from the seed, so samples are asked for by "
            "their number. If they fit into memory: return list(stream). If not, say how many there are: "
            f"{_sized(data)}; or write them to a file once and index it: phalanx.data.JsonLines, Parquet, TokenFile."
        )
    if isinstance(data, (Tensor, np.ndarray)):
        return f"{described(data)}, whose rows have no name. Write: return phalanx.data.Arrays(x=data)"
    if isinstance(data, tuple) and data and all(isinstance(each, (Tensor, np.ndarray)) for each in data):
        names = ", ".join(f"{name}={name}" for name in ("x", "y", "z", "w")[: len(data)])
        return f"a tuple of {len(data)} arrays, not samples. Write: return phalanx.data.Arrays({names})"
    if isinstance(data, str):
        return f"text ({data[:40]!r}), not samples. Open it: phalanx.data.JsonLines(path), Parquet(path), or a class."
    return ""


def _sized(stream: Any) -> str:
    """The line that makes a data set of a stream."""
    if hasattr(stream, "num_shards"):
        return f'return phalanx.data.Shards.of(stream, "sizes.json"), which counts its {stream.num_shards} shards once'
    if isinstance(stream, IterableDataset):
        return "give it a __len__(), or return phalanx.data.Shards([...], sizes) of parts that can each be iterated"
    return "return phalanx.data.Shards([...], sizes) of parts that can each be iterated again"


def not_a_sample(sample: Any, index: int) -> WrongUse:
    """For a sample that is no dict."""
    say = f"sample {index} is {described(sample)}, not a dict with names."
    if isinstance(sample, (tuple, list)):
        names = ", ".join(f'"{name}"' for name in ("x", "y", "z", "w")[: len(sample)])
        return WrongUse(f"{say} Name what it holds: return phalanx.data.Named(dataset, {names})")
    if isinstance(sample, (Tensor, np.ndarray, int, float)):
        return WrongUse(f'{say} Name it: return phalanx.data.Arrays(x=data), or give {{"x": ...}} for [i].')
    return WrongUse(f"{say} Task.data must give dicts of tensors or numbers, e.g. {{'x': ..., 'y': ...}}.")


def check_values(sample: Mapping[str, Any], index: int, data: Any) -> None:
    """Refuse what would be stacked into something else: lists of numbers, as data sets have that were not formatted."""
    for name, value in sample.items():
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], (int, float, str, list)):
            how = f'{{"{name}": torch.tensor(...)}} for [i]'
            if hasattr(data, "with_format"):  # Hugging Face's
                how = 'return dataset.with_format("torch")'
            raise WrongUse(
                f"{name} of sample {index} is a list ({described(value)}), which does not stack. Give tensors: {how}; "
                "or give the task a collate(samples)."
            )
        if value is None:
            raise WrongUse(f"{name} of sample {index} is None, which does not stack. Leave it out, or give a number.")


def check_rows(batch: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a batch from which samples were left out: they would never be trained on, and counted as if they were.

    One whose rows are not each a sample, since several are packed into one, has no fewer samples for having fewer rows.
    """
    columns = {n: c for n, c in dict(batch).items() if isinstance(c, (Tensor, np.ndarray)) and c.ndim}
    each = [n for n, c in columns.items() if all(n in s and _shape(s[n]) == tuple(c.shape[1:]) for s in samples)]
    rows = {len(column) for column in columns.values()}
    if len(rows) == 1 and each and 0 < (found := next(iter(rows))) < len(samples):
        raise WrongUse(
            f"collate() made {many(found, 'row')} of {len(samples)} samples: those that it leaves out would be counted "
            "as trained on. Leave them out of data() instead."
        )


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))


def unstackable(samples: Sequence[Mapping[str, Any]], ids: Sequence[int]) -> WrongUse | None:
    """Which column does not stack, and why, where that can be seen."""
    first = samples[0]
    for sample, index in zip(samples, ids, strict=True):
        if set(sample) != set(first):
            odd = sorted(set(sample) ^ set(first))[0]
            return WrongUse(
                f"sample {index} and sample {ids[0]} differ in what they hold: one has {odd!r}. Make them alike, or "
                "give the task a collate(samples)."
            )
    for name, value in first.items():
        if value is None:
            continue  # which `check_values` refuses
        for sample, index in zip(samples, ids, strict=True):
            other = sample[name]
            if isinstance(value, (Tensor, np.ndarray)) and getattr(other, "shape", None) != value.shape:
                return WrongUse(
                    f"{name} of sample {ids[0]} is {described(value)} and of sample {index} {described(other)}: they "
                    "do not stack. Pad or cut them to one length, or give the task a collate(samples) that does."
                )
        if not isinstance(value, (Tensor, np.ndarray, np.generic, bool, int, float, str, bytes, Mapping, list, tuple)):
            return WrongUse(
                f"{name} of sample {ids[0]} is {described(value)}, which does not stack. Give a tensor or a number, "
                "such as torch.as_tensor(np.asarray(value)) for an image."
            )
    return None


def _listed(names: Mapping[Any, Any]) -> str:
    return ", ".join(map(str, list(names)[:SHOWN]))
