"""Whether a task's samples are what they seem: each the same whenever it is read, and its own."""

from __future__ import annotations

import inspect
import random
import re
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from phalanx.data.adopted import stacks
from phalanx.data.fingerprint import digest, near
from phalanx.data.kinds import check_values, count_samples, not_a_sample, unstackable
from phalanx.errors import WrongUse
from phalanx.losses import Loss
from phalanx.task import Task
from phalanx.train.check import lines
from phalanx.train.check.subject import SAMPLES, Fails, RefusedAnyway, Subject, copied, first_ids, raising, read

SLOW_SECONDS = 0.05
"""Samples that take longer are not read a second time."""
MOST_LOOKED_AT = 1000
"""So many objects of a data set are looked at for generators."""
IGNORED = -100
"""What targets that do not count are set to: nobody's label, as 0 and -1 are."""


def fingerprint(value: Any) -> str:
    """A hash of what a sample holds, but for objects that only the user knows to compare."""
    return digest(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return value if value.dtype.kind in "biufc" else value.tolist()
    return value if isinstance(value, (Tensor, np.generic, int, float, str, bytes)) else None


def reading(task: Task, data: Any, method: str = "data") -> str:
    """Where samples are read: in a class of the user's, or where the data is made."""
    return lines.first_of(getattr(type(data), "__getitem__", None), type(data), getattr(type(task), method))


def read_samples(task: Task, data: Any) -> tuple[list[Any], list[str]]:
    """The first samples to be trained on, and what is only likely to be wrong with them."""
    count(task, data)
    ids = first_ids(task, data)
    where = lines.at(reading(task, data))
    began = time.perf_counter()
    samples = [read_sample(task, data, ids[0])]
    slow = time.perf_counter() - began > SLOW_SECONDS
    kept = copied(samples[0])
    samples += [read_sample(task, data, index) for index in ids[1 : 3 if slow else SAMPLES]]
    if fingerprint(kept) != fingerprint(samples[0]):
        raise WrongUse(
            f"samples of {type(task).__name__}.data share memory: reading sample {ids[1]} changed sample {ids[0]}, "
            f"which was read before{where}, so that a batch would hold one of them many times. Return a copy: "
            "buffer.clone(), or array.copy()."
        )
    samples = [copied(sample) for sample in samples]
    _check_stack(task, data, ids, samples)
    if not slow:
        _check_repeats(task, data, ids, samples)
        read_sample(task, data, near(data, [len(data) - 1])[0])
    return samples, _not_finite(task, ids, samples)


def read_sample(task: Task, data: Any, index: int, method: str = "data") -> Any:
    """One sample; refused with its number where reading it fails, or gives none."""
    try:
        sample = read(task, data, index)
    except Fails as failure:
        if failure.line:
            first = (str(failure.error).splitlines() or [""])[0]
            raise WrongUse(
                f"sample {index} of {len(data):,} cannot be read: {type(failure.error).__name__}: {first}"
                f"{lines.at(failure.line)}. Mend it there; {type(task).__name__}.{method}() must have a sample at "
                "every number below its len()."
            ) from failure
        raise
    if not isinstance(sample, dict):
        raise RefusedAnyway(str(not_a_sample(sample, index)))
    return sample


def count(task: Task, data: Any, method: str = "data") -> int:
    """How many samples there are; what is no data set is refused as in training."""
    with raising(f"len() of {type(task).__name__}.{method}()"):
        return count_samples(data, f"{type(task).__name__}.{method}")


def _check_stack(task: Task, data: Any, ids: list[int], samples: list[Any]) -> None:
    """Samples that are only stacked must be such that they can be, as in training."""
    if not stacks(task, data):
        return
    with raising(f"{type(task).__name__}.collate()", type(task).data):
        try:
            check_values(samples[0], ids[0], data)
            task.collate(samples)
        except Exception:
            if found := unstackable(samples, ids[: len(samples)]):
                raise found from None
            raise


def _check_repeats(task: Task, data: Any, ids: list[int], samples: list[Any]) -> None:
    for index, sample in zip(ids, samples, strict=False):
        before = _states(data)
        again = read_sample(task, data, index)
        names = [n for n, v in sample.items() if fingerprint(v) != fingerprint(again.get(n))]
        if names:
            raise WrongUse(
                f"sample {index} of {type(task).__name__}.data is another when it is read again: {names[0]!r} "
                f"differs{lines.at(reading(task, data))}. {_remedy(before, _states(data))}"
            )


def _states(data: Any) -> dict[str, str]:
    """The generators that a data set has of its own: by the line that seeds each, what state it is in."""
    found = {}
    seeded: dict[str, str] = {}
    for path, each in _inside(data):
        library = next((line for outer, line in seeded.items() if path.startswith(outer)), "")
        if isinstance(each, np.random.Generator):
            found[library or f"{path} = np.random.default_rng(seed)"] = repr(each.bit_generator.state)
        elif isinstance(each, np.random.RandomState):
            found[library or f"{path}.seed(seed)"] = repr(each.get_state())
        elif isinstance(each, random.Random):
            found[library or f"{path}.seed(seed)"] = repr(each.getstate())
        elif isinstance(each, torch.Generator):
            found[library or f"{path}.manual_seed(seed)"] = fingerprint(each.get_state())
        elif callable(getattr(type(each), "set_random_seed", None)):
            seeded.setdefault(f"{path}.", f"{path}.set_random_seed(seed)")
    return found


def _remedy(before: dict[str, str], after: dict[str, str]) -> str:
    """What to do about samples that differ, by whether a generator of the data set's own was drawn from."""
    for line, state in after.items():
        if before.get(line) != state:
            owner = re.split(r" =|\.(?:set_random_seed|seed|manual_seed)\(", line)[0]
            return (
                f"{owner} draws from a random generator of its own, which goes on from sample to sample. Give the "
                "data set a method that seeds it, which is called before each sample is read: "
                f"def reseed(self, seed): {line}."
            )
    return (
        "It must not depend on what was read before, or on a generator of its own: draw from torch's, numpy's or "
        "Python's global ones, which are seeded for every sample, and change a copy, not what is stored."
    )


def _inside(data: Any) -> Iterator[tuple[str, Any]]:
    """Objects that a data set has, or that its ``__getitem__`` finds in its module, and how they are written there."""
    own = getattr(type(data), "__getitem__", None)
    names, known = getattr(getattr(own, "__code__", None), "co_names", ()), getattr(own, "__globals__", {})
    waiting = [(name, known[name]) for name in names if name in known]
    waiting = [("self", data), *((name, each) for name, each in waiting if hasattr(each, "__dict__"))]
    seen: set[int] = set()
    while waiting and len(seen) < MOST_LOOKED_AT:
        path, found = waiting.pop(0)
        if id(found) in seen or isinstance(found, (type, ModuleType, Tensor, np.ndarray)):
            continue
        seen.add(id(found))
        yield path, found
        if isinstance(found, (list, tuple)):
            waiting += [(f"{path}[{number}]", each) for number, each in enumerate(found[:SAMPLES])]
        else:
            waiting += [(f"{path}.{name}", each) for name, each in getattr(found, "__dict__", {}).items()]


def _not_finite(task: Task, ids: list[int], samples: list[Any]) -> list[str]:
    for index, sample in zip(ids, samples, strict=False):
        for name, value in sample.items():
            tensor = value if isinstance(value, Tensor) else None
            if isinstance(value, (np.ndarray, float)) and np.asarray(value).dtype.kind == "f":
                tensor = torch.as_tensor(value)
            if tensor is not None and tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                return [
                    f"{name!r} of sample {index} has numbers that are not finite{lines.at(lines.of(type(task).data))}: "
                    "a step with it is skipped. Leave such samples out, or fill them in."
                ]
    return []


class LeftOut(TorchFunctionMode):
    """Notices the targets that torch's losses are told to leave out: their value, and how many targets there are."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.cross_entropy, F.nll_loss):
            given = inspect.signature(func).bind(*args, **kwargs or {}).arguments
            target, value = given["target"], given.get("ignore_index", IGNORED)
            if isinstance(target, Tensor) and bool((target == value).any()):
                self.found[value] = target.numel()
        return func(*args, **kwargs or {})


def check_counts(subject: Subject) -> None:
    """Targets that the loss leaves out must not be counted, where the samples have any."""
    with torch.no_grad(), LeftOut() as left_out:
        subject.compute(subject.places)
    for name, column in subject.batch(subject.places).items():
        if not isinstance(column, Tensor) or column.is_floating_point() or column.dtype == torch.bool:
            continue
        for value in {IGNORED, *left_out.found}:
            if bool((column == value).any()) and not bool((column == value).all()):
                _check_ignored(subject, name, value, {column.numel(), left_out.found.get(value)})


def _check_ignored(subject: Subject, name: str, value: int, every: set[int | None]) -> None:
    """``every``: how many targets there may be, with those that are left out; another count is of something else."""
    batch = subject.batch(subject.places)
    before = fingerprint(subject.task.inputs(batch))
    batch[name] = torch.full_like(batch[name], value)
    with raising("the inputs"):
        if fingerprint(subject.task.inputs(batch)) != before:
            return  # the model sees them: no targets
    try:
        with torch.no_grad(), lines.returns(type(subject.task).loss) as returned:
            loss: Loss = subject.compute(subject.places, batch).loss
    except (Fails, WrongUse):
        return  # the loss has no such targets
    total, count = float(loss.total), float(loss.count or 0)
    if total == 0 and count in every:
        raise WrongUse(
            f"{subject.name}.loss counts targets that it leaves out: with every {name!r} at {value} the total is 0 and "
            f"the count {count:g}{lines.at(returned())}, so that the mean depends on how many are left out. Count the "
            f"others: (targets != {value}).sum(), as phalanx.losses.cross_entropy does."
        )
