"""A task as it is proven: the user's own, made awkward on purpose. Friendly data hides most bugs.

Batches do not divide by ranks, an epoch ends within the steps, targets are ignored unevenly, weights that begin as
zeros or ones do not, those that begin frozen are so in one step alone, some gradients are clipped, there are several
micro-batches and buckets, and in one more step a sample's loss is not a number.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.data.adopted import adopted, collate_of, own_collate
from phalanx.data.by_length import ByLength, LengthOrder
from phalanx.data.columns import column_of
from phalanx.data.fingerprint import digest
from phalanx.data.kinds import count_samples
from phalanx.data.order import Order
from phalanx.data.planned import training_order
from phalanx.data.seeding import sample_at, seed_globally
from phalanx.kernels import linear_cross_entropy
from phalanx.losses import Loss
from phalanx.parallel.axes import overlap
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.randomness.draws import Moment
from phalanx.parallel.weights import bucket
from phalanx.prove.replacing import replacing
from phalanx.task import Batch, Task, as_loss
from phalanx.train.shrink import FromConfig
from phalanx.train.thawed import thawed
from phalanx.train.variant import Variant, variant
from phalanx.train.widened import Float64, Widened
from phalanx.trees import mapped

BATCH = 17
"""Samples of a step, for up to 8 ranks: a prime, so that no number of ranks or micro-batches divides it."""
IGNORED = -100
BUCKET_BYTES, SMALL_BYTES, LOGIT_ELEMENTS, CHUNK_BYTES = 1 << 17, 1 << 14, 1 << 14, 1 << 8


@dataclass
class Trial:
    """What is done to a task."""

    steps: int
    """Those that train; among them is one more, in which the last sample's loss is not a number."""
    batch: int = BATCH
    size: int = 0
    """Samples in all: the second step is short, and the third begins an epoch."""
    length: int | None = None
    """Where sequences are cut off."""
    vocabulary: int | None = None
    """Larger ids are folded into it."""
    special: dict[int, int] = field(default_factory=dict)
    """Tokens that mean something to the model, each with what it becomes. Nothing else becomes one of these."""
    ignorable: tuple[str, ...] = ()
    """Columns of targets in which some are ignored."""
    spread: dict[str, int] = field(default_factory=dict)
    """Columns of ids that are dealt out over a whole vocabulary, so that each part of it is used."""
    samples: TrialSamples | None = None
    """Those that its data was asked for last."""
    source: tuple[int, Any] | None = None
    """The task's data, and in which process it was made."""
    held: tuple[int, Any] | None = None
    """What it keeps aside, likewise."""
    moment: Moment = field(default_factory=Moment)
    """What is computed just now; whoever computes puts its own here."""
    together: bool = False
    """Whether the loss may need all micro-batches of a step at the same time, as the first run has shown."""
    lifted: bool = False
    """Whether the task's own code computes in float64 what would be narrower otherwise."""
    beginning: Any = None
    """What each reference begins with, once the first has found out."""
    attributes: frozenset[str] = frozenset()
    """What the task had, fields or not, before anything was asked of it."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {
            "samples": None,
            "source": None,
            "held": None,
            "moment": Moment(),
            "beginning": None,
        }  # each process has its own

    @property
    def poisoned(self) -> int:
        """The step that must be skipped. One follows it, if there are enough."""
        return min(2, self.steps)

    @property
    def idle(self) -> int:
        """The step in which half of the experts get no token."""
        return min(1, self.steps - 1)

    @property
    def half(self) -> int:
        """The step before which the run is interrupted."""
        return (self.steps + 1) // 2


class TrialSamples:
    """Some of a task's samples, which notes what is read."""

    def __init__(self, data: Any, trial: Trial, most: int, ignoring: bool = True) -> None:
        """``ignoring``: some targets are ignored, which a loss has been seen to bear."""
        self.data, self.trial, self.ignoring, self.collate_fn = data, trial, ignoring, own_collate(data)
        size = min(most, len(data))
        self.places = _places(data, size)
        self.order: Order | None = None
        """In which they are trained on, once it was asked for."""
        self.read: list[tuple[int, str]] = []
        """Each sample read: its number, and a hash of what it was and of what a draw gave there."""

    def __len__(self) -> int:
        return len(self.places)

    def column(self, name: str) -> Any:
        return np.asarray(column_of(self.data, name))[self.places]

    def training_order(self, global_batch: int, seed: int) -> Order:
        """As of any data; by length, where the task's is, and with about as many tokens as a step has otherwise."""
        if not isinstance(self.data, ByLength):
            return Order(len(self), global_batch, seed)
        lengths = np.minimum(self.data.lengths[self.places], self.trial.length or np.inf).astype(np.int64)
        most = max(int(lengths.max()), int(lengths.mean() * global_batch)) if self.data.batch_tokens else 0
        return LengthOrder(
            len(self), global_batch, seed, lengths=lengths, grouped=self.data.grouped, batch_tokens=most
        )  # fmt: skip

    def __getitem__(self, index: int) -> Any:
        drawn = random.random(), float(np.random.random()), float(torch.rand(()))
        sample = self.data[self.places[index]]
        if isinstance(sample, dict):
            sample = {name: self._changed(index, name, value) for name, value in sample.items()}
        self.read.append((index, digest([sample, drawn])))
        return sample

    def _changed(self, index: int, name: str, value: Any) -> Any:
        trial = self.trial
        if not isinstance(value, (Tensor, np.ndarray, int, np.integer)) or isinstance(value, bool):
            return value
        tensor = before = torch.as_tensor(value)
        if trial.length and tensor.ndim == 1:
            tensor = tensor[: trial.length]
        if not tensor.is_floating_point() and tensor.dtype != torch.bool:
            tensor = self._ids(index, name, tensor)
        if tensor is before or torch.equal(tensor, before):
            return value
        if isinstance(value, np.ndarray):
            return tensor.numpy()
        return tensor if isinstance(value, Tensor) else type(value)(tensor.item())

    def _ids(self, index: int, name: str, tensor: Tensor) -> Tensor:
        trial = self.trial
        if trial.vocabulary:
            tensor = _folded(tensor, trial.vocabulary, trial.special)
        if name in trial.spread:
            tensor = _dealt(tensor, trial.spread[name], trial.special.values())
        if name in trial.ignorable and self.ignoring:
            tensor = _ignored_unevenly(tensor, index)
        return tensor


def _folded(tokens: Tensor, size: int, special: dict[int, int]) -> Tensor:
    """Tokens that are too many folded into so many; special ones become what they are to become, and no others do."""
    taken = torch.tensor([*special.values()], dtype=tokens.dtype)
    words = _words(size, frozenset(special.values()))
    other = words[tokens.clamp(min=0).long() % len(words)].to(tokens.dtype)
    found = tokens.where((tokens < size) & ~torch.isin(tokens, taken), other)
    return _with_special(tokens, found, special)


def _dealt(tokens: Tensor, size: int, special: Iterable[int]) -> Tensor:
    """Tokens dealt out over all of so many, but for special ones."""
    words = _words(size, frozenset(special))
    places = torch.searchsorted(words, tokens.long())
    found = words[places * _stride(len(words)) % len(words)].to(tokens.dtype)
    return _with_special(tokens, found, {token: token for token in special})


def _with_special(tokens: Tensor, found: Tensor, special: dict[int, int]) -> Tensor:
    for token, becomes in special.items():
        found = found.where(tokens != token, becomes)
    return tokens.where(tokens < 0, found)


@cache
def _words(size: int, special: frozenset[int]) -> Tensor:
    """Tokens that mean nothing in particular."""
    return torch.tensor([word for word in range(size) if word not in special] or [0])


def _places(data: Any, size: int) -> list[int]:
    """So many of a data set's samples, from all of it; or its first ones, where others take long to read."""
    return [*range(size)] if hasattr(data, "near") else [index * len(data) // size for index in range(size)]


def _ignored_unevenly(targets: Tensor, index: int) -> Tensor:
    """Of some samples all targets, of some a part, of others none: some micro-batches have none left."""
    if not targets.ndim:
        return torch.full_like(targets, IGNORED) if index % 5 in (1, 3) else targets
    keep = targets.shape[0] * max(0, index % 5 - 1) // 3
    place = torch.arange(targets.shape[0]).view(-1, *[1] * (targets.ndim - 1))
    return targets.where(place < keep, IGNORED)


def _stride(size: int) -> int:
    """A step through a vocabulary that reaches all of it, and soon every part."""
    return next(n for n in range(max(1, int(size * 0.618)), 2 * size + 2) if math.gcd(n, size) == 1)


class Hostile(Variant):
    """Stands before a task's own class."""

    proof_trial: Trial

    def sent(self) -> set[str]:
        return super().sent() | self.proof_trial.attributes | {"proof_trial", *FromConfig.__annotations__}

    def model(self) -> nn.Module:
        model = super().model()
        with torch.no_grad():
            for weight in model.parameters():
                if not weight.is_floating_point():
                    continue
                drawn = torch.rand(weight.shape, dtype=weight.dtype)
                if weight.ndim > 1:
                    weight.add_(drawn.sub_(0.5), alpha=0.1)
                else:  # signs stay, so that what must be positive is
                    weight.copy_(weight * (drawn + 0.5) + (weight == 0) * (drawn - 0.5))
        return model

    def pretrained(self) -> None:
        return None

    def data(self) -> TrialSamples:
        trial, here = self.proof_trial, os.getpid()
        if trial.source is None or trial.source[0] != here:  # a rank may make something else of it
            trial.source = here, adopted(super().data(), self, "data", checked=False)
        samples = TrialSamples(trial.source[1], trial, 2 * trial.batch - 5)
        trial.size, trial.samples = len(samples), samples
        return samples

    @property
    def proof_order(self) -> Order:
        """The order that the samples of the trial are trained on in."""
        samples = self.proof_trial.samples
        assert samples is not None, "its data was not asked for"
        samples.order = samples.order or training_order(self, samples)
        return samples.order

    def sample_weights(self, data: TrialSamples) -> Tensor | None:
        own = super().sample_weights(data.data)
        if own is None:
            return None
        found = torch.as_tensor(own)[data.places]
        return found if bool(found.any()) else torch.ones(len(data))  # those that are here may be drawn never

    def held_out(self) -> TrialSamples | None:
        trial, here = self.proof_trial, os.getpid()
        if trial.held is None or trial.held[0] != here:
            trial.held = here, adopted(super().held_out(), self, "held_out", checked=False)
        held = trial.held[1]
        if held is None:
            return None
        count_samples(held, f"{type(self).__name__}.held_out")
        return TrialSamples(held, trial, trial.batch + 3, ignoring=False)

    def evaluate(self, output: Any, batch: dict[str, Any]) -> Any:
        with self._widened():
            return super().evaluate(output, batch)

    def summarise(self, gathered: dict[str, Any]) -> dict[str, float]:
        with self._widened():
            return super().summarise(gathered)

    def beforehand(self) -> Any:
        measure = super().beforehand()
        return None if measure is None else partial(self._measured, measure)

    def _measured(self, measure: Callable[..., Any], output: Any, batch: dict[str, Any]) -> Any:
        with self._widened():
            return measure(output, batch)

    @contextmanager
    def _widened(self) -> Iterator[None]:
        """While the task's own code computes with what the model gave."""
        with Float64() if self.precision == "float64" else Widened() as mode:
            yield
        self.proof_trial.lifted |= isinstance(mode, Float64) and mode.lifted > 0

    def loss(self, output: Any, batch: dict[str, Any]) -> Loss:
        with self._widened():
            loss = as_loss(super().loss(output, batch), self)
        moment, order = self.proof_trial.moment, self.proof_order
        training = torch.is_grad_enabled()
        if training and moment.step == self.proof_trial.poisoned and moment.slots[-1] == order.slots(moment.step) - 1:
            return replace(loss, total=loss.total * float("nan"))
        return loss


def hostile(task: Task, trial: Trial) -> Task:
    """A copy of a task under a trial."""
    task = thawed(task, min(1, trial.steps - 1))
    proven: Task = variant(
        task, Hostile, steps=trial.steps + 1, epochs=0, precision="float64", workers=0, evaluate_every=0,
        proof_trial=trial, global_batch=trial.batch, warmup_steps=min(1, task.warmup_steps),
    )  # fmt: skip
    seed_globally(task.seed, "data")
    object.__setattr__(proven, "global_batch", min(trial.batch, len(proven.data())))
    return proven


def wide_batch(task: Task, data: Any, ids: Iterable[int], visits: Iterable[int] = itertools.repeat(0)) -> Batch:
    """These samples as a batch of float64; ``visits``: which visit of each this is."""
    samples = [sample_at(data, int(index), task.seed, int(visit)) for index, visit in zip(ids, visits, strict=False)]
    tensors = collate_of(task, data)(samples)
    return Batch({n: mapped(lambda t: t.double() if t.is_floating_point() else t, v) for n, v in tensors.items()})


@contextmanager
def cramped() -> Iterator[None]:
    """While this lasts, little is enough for a second bucket, a message of its own, a second chunk of
    logits or of tokens, and for tp to compute while it sums."""
    with replacing() as put:
        put(bucket, "BUCKET_BYTES", BUCKET_BYTES)
        put(Communicator, "small_bytes", SMALL_BYTES)
        put(linear_cross_entropy, "LOGIT_ELEMENTS", LOGIT_ELEMENTS)
        put(overlap, "LEAST_BYTES", 0)
        put(overlap, "CHUNK_BYTES", CHUNK_BYTES)
        yield


def vocabularies(model: nn.Module, batch: dict[str, Any]) -> Callable[[], dict[str, int]]:
    """Watch which columns of a batch the model looks up, until asked."""
    found: dict[str, int] = {}

    def looked_up(module: nn.Module, args: tuple[Any, ...]) -> None:
        for name, column in batch.items():
            if isinstance(column, Tensor) and args and isinstance(args[0], Tensor) and torch.equal(column, args[0]):
                found[name] = int(module.num_embeddings)  # type: ignore[arg-type]

    hooks = [m.register_forward_pre_hook(looked_up) for m in model.modules() if isinstance(m, nn.Embedding)]

    def end() -> dict[str, int]:
        for hook in hooks:
            hook.remove()
        return found

    return end


def ignorable(task: Task, batch: dict[str, Any], output: Any) -> tuple[str, ...]:
    """Columns of whole numbers that the loss skips where they are -100, and the model never sees."""
    found = []
    for name, column in batch.items():
        if not isinstance(column, Tensor) or column.is_floating_point() or column.dtype == torch.bool:
            continue
        changed = copy.copy(batch)
        changed[name] = column.clone()
        changed[name][::2] = IGNORED
        try:
            seen = digest(task.inputs(changed)) != digest(task.inputs(batch))
            before, after = task.loss(output, batch), task.loss(output, changed)
        except Exception:  # a column that may hold no such number
            continue
        fewer = 0 < float(as_loss(after, task).count or 0) < float(as_loss(before, task).count or 0)
        if not seen and fewer and bool(torch.isfinite(after.total)):
            found.append(name)
    return tuple(found)
