"""Data sets as people have them, made ones that are asked for samples by number: what `Task.data` may return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    default_collate,
)

from phalanx.data.columns import column_of
from phalanx.data.seeding import seed_globally
from phalanx.data.shards import Shards
from phalanx.errors import WrongUse
from phalanx.task import Task
from phalanx.traces import described

SAMPLE = "(sample)"
"""What a sample that has no names is under, until a ``collate_fn`` takes it."""
Collate = Callable[[Sequence[Any]], dict[str, Any]]


def training_samples(task: Task) -> Any:
    """What a task's `data` gives, asked for samples by number."""
    seed_globally(task.seed, "data")
    return adopted(task.data(), task, "data")


def held_out_samples(task: Task) -> Any:
    """What its `held_out` gives, likewise, or None."""
    seed_globally(task.seed, "held out")
    return adopted(task.held_out(), task, "held_out")


def adopted(data: Any, task: Task, method: str, checked: bool = True) -> Any:
    """A data set as it is; what a `DataLoader` reads; a stream that says how long it is; columns of lists as tensors.

    ``checked``: the batches of a `DataLoader` must be the task's.
    """
    name = f"{type(task).__name__}.{method}"
    if isinstance(data, DataLoader):
        if checked:
            _check_loader(data, task, method)
        return LoadedSamples(adopted(data.dataset, task, method), data, task, name)
    if isinstance(data, IterableDataset) and _length(data):
        return Shards.of(data, _length(data))
    if stacks(task) and _unformatted(data):
        return data.with_format("torch")
    return data


def stacks(task: Task, data: Any = None) -> bool:
    """Whether samples are only stacked: neither the task nor its data has a way of its own."""
    return type(task).collate is Task.collate and own_collate(data) is None


def own_collate(data: Any) -> Collate | None:
    """How a data set itself makes a batch of samples, where it does."""
    return getattr(data, "collate_fn", None)


def collate_of(task: Task, data: Any) -> Collate:
    """How samples of some data become a batch."""
    return own_collate(data) or task.collate


class LoadedSamples:
    """What a `DataLoader` reads, and its ``collate_fn``, if it has one of its own."""

    def __init__(self, data: Any, loader: DataLoader[Any], task: Task, name: str) -> None:
        own = None if loader.collate_fn is default_collate else loader.collate_fn
        if own is not None and type(task).collate is not Task.collate:
            raise WrongUse(
                f"{name} returned a DataLoader with a collate_fn, and {type(task).__name__} has a collate() too. Leave "
                "one of them out."
            )
        self.data, self._own, self._name = data, own, name
        self.collate_fn = None if own is None else self._collated
        workers = loader.num_workers if loader.num_workers != task.workers else 0
        self.notes = [f"num_workers={workers} of the DataLoader is not taken; set workers={workers}"] if workers else []

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        sample = self.data[index]
        return sample if self._own is None or isinstance(sample, dict) else {SAMPLE: sample}

    def column(self, name: str) -> Any:
        """A column of all samples."""
        return column_of(self.data, name)

    def _collated(self, samples: Sequence[Any]) -> dict[str, Any]:
        assert self._own is not None
        given = [sample.get(SAMPLE, sample) for sample in samples]
        batch = self._own(given)
        if not isinstance(batch, Mapping):
            raise WrongUse(
                f"the collate_fn of {self._name} returned {described(batch)}, not a dict. Return what it holds by "
                'name, such as {"x": x, "y": y}.'
            )
        more = [name for name in samples[0] if SAMPLE in samples[0] and name != SAMPLE]  # which are known beforehand
        return {**batch, **{name: default_collate([sample[name] for sample in samples]) for name in more}}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "data":
            raise AttributeError(name)
        return getattr(self.data, name)


def _check_loader(loader: DataLoader[Any], task: Task, method: str) -> None:
    """Refuse a loader that would give other batches than a task's own settings do, and say what to write."""
    wrong = ""
    if loader.batch_size is None:
        how = f"batch_sampler={type(loader.batch_sampler).__name__}" if loader.batch_sampler else "batch_size=None"
        wrong = f"{how}: which samples a step has follows from the seed. Give batch_size={task.global_batch} instead"
    elif not isinstance(loader.dataset, IterableDataset) and (told := _other_order(loader.sampler, method)):
        wrong = told
    elif loader.worker_init_fn is not None:
        wrong = "a worker_init_fn, which is not called here. Do what it does when the data set first reads a sample"
    elif method == "data" and loader.batch_size != task.global_batch:
        wrong = (
            f"batch_size={loader.batch_size}, and the task has global_batch={task.global_batch}, for all ranks "
            f"together. Set global_batch={loader.batch_size}, or give that batch_size"
        )
    elif method == "data" and loader.drop_last and task.last_batch != "drop":
        wrong = f"drop_last=True, and the task has last_batch={task.last_batch}. Set last_batch=drop"
    if wrong:
        raise WrongUse(f"{type(task).__name__}.{method} returned a DataLoader with {wrong}, or return its dataset.")


def _other_order(sampler: Any, method: str) -> str:
    """What is wrong with a sampler that gives another order than ours."""
    kind = type(sampler)
    shuffled = kind is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    if shuffled or (kind is SequentialSampler and method != "data"):
        return ""
    if kind is SequentialSampler:
        return "shuffle=False, and what is trained on is shuffled anew each epoch. Give shuffle=True"
    if method == "data" and (kind is WeightedRandomSampler or (kind is RandomSampler and sampler.replacement)):
        return (
            f"sampler={kind.__name__}, which draws otherwise on each rank. Give the task sample_weights(self, data), "
            "which returns one weight for each sample, or balance= with a column of classes; and shuffle=True"
        )
    return (
        f"sampler={kind.__name__}: which sample is in which step follows from the seed, at any number of ranks. Give "
        "shuffle=True; sources by weights are a phalanx.data.Mixture, and a part of the data is a Subset of it"
    )


def _length(data: Any) -> int:
    """How many samples a stream says that it has; 0: it does not."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return 0


def _unformatted(data: Any) -> bool:
    """Whether it is a data set of Hugging Face's that gives lists where tensors are meant."""
    return hasattr(data, "with_format") and hasattr(data, "features") and (getattr(data, "format", None) or {}).get(
        "type", "given"
    ) is None  # fmt: skip
