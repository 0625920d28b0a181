"""A task on one device: its model, a few of its samples, and what it makes of them, every draw keyed as in training."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phalanx import configs
from phalanx.data.adopted import Collate
from phalanx.data.planned import training_order
from phalanx.data.seeding import sample_at, seed_globally
from phalanx.errors import WrongUse
from phalanx.logits import Logits
from phalanx.losses import Loss
from phalanx.parallel.axes import batchnorm, hugging_face
from phalanx.parallel.randomness.answers import Answers, generator_state
from phalanx.parallel.randomness.draws import Moment, Randomness
from phalanx.parallel.randomness.torch_checkpoint import RunOnce
from phalanx.parallel.weights import keras
from phalanx.parallel.weights.blueprint import Blueprint
from phalanx.parameters import building, fitted
from phalanx.precision import cast
from phalanx.task import Batch, Task, as_loss, called
from phalanx.train.check import lines
from phalanx.train.shrink import Needs, by_config
from phalanx.train.step import silent
from phalanx.train.widened import Widened
from phalanx.trees import leaves, mapped

SAMPLES, SOME_SAMPLES, FEW_SAMPLES, FEWEST_SAMPLES = 7, 4, 3, 2
LARGE_WEIGHTS, TOO_MANY_WEIGHTS = 3_000_000, 100_000_000
"""Models with more are made smaller if it is known how; with more yet, they are not tried if it is not."""
MUCH_WORK, MOST_WORK = 1 << 26, 1 << 33
"""Weights times numbers in a sample: about what a convolution of it costs."""
SHORT = 32
"""Sequences of a model that was made smaller are cut off there."""


class CannotCheck(Exception):
    """Why a task, or the rest of it, is not checked."""


class RefusedAnyway(WrongUse):
    """What training refuses as well: to leave the check out would not help."""


class Fails(Exception):
    """The user's code has raised."""

    def __init__(self, where: str, error: Exception, method: Any = None) -> None:
        """``method``: to be named where the error came through no line of the user's."""
        super().__init__(where)
        self.where, self.error, self.line = where, error, lines.first_of(lines.of_error(error), method)

    def __str__(self) -> str:
        first = (str(self.error).splitlines() or [""])[0]
        return f"{self.where} fails: {type(self.error).__name__}: {first}{lines.at(self.line)}"


@contextmanager
def raising(where: str, method: Any = None) -> Iterator[None]:
    """While the user's code runs: what it raises is known to be its own. ``method``: to be named if no line is."""
    try:
        yield
    except (CannotCheck, Fails):
        raise
    except WrongUse as refusal:
        raise RefusedAnyway(f"{refusal}{unless_said(lines.of_refusal(refusal, method), str(refusal))}") from refusal
    except Exception as error:
        raise Fails(where, error, method) from error


def unless_said(line: str, text: str) -> str:
    """A place to be put behind what is said, if that does not have it."""
    return "" if line in text else lines.at(line)


@dataclass
class ModuleCall:
    """One call of a module."""

    name: str
    module: nn.Module
    got: list[Tensor]
    output: Any
    attached: bool
    """Gradients flow back from what it gave."""

    @property
    def gave(self) -> list[Tensor]:
        return tensors_in(self.output)


@dataclass
class Given:
    """What a task made of some samples."""

    batch: dict[str, Any]
    inputs: Any
    output: Any
    value: Any
    """Of its loss, or of what it evaluates."""
    modules: list[ModuleCall] = field(default_factory=list)
    """Every call of a module, in the order in which they ended, if that was watched."""

    @property
    def loss(self) -> Loss:
        return self.value


class Subject:
    """A task's model and samples, and how to compute some of them."""

    collate: Collate | None = None  # of the samples' data set, where that makes batches and not the task

    def __init__(self, task: Task, samples: Sequence[Any], all_samples: bool = False) -> None:
        self.task, self.samples = task, list(samples)
        self.name = type(task).__name__
        with raising(f"{self.name}.model()", type(task).model):
            self.model, self.changed = self._made()
        for name, weight in self.model.named_parameters():
            weight.logical_name = name  # type: ignore[attr-defined]
        self.weights = sum(weight.numel() for weight in self.model.parameters())
        if not all_samples:
            self.take(self.samples[: self._enough()])
        self.dtype = torch.float64 if task.precision == "float64" else torch.float32
        self.model.to(self.dtype)
        hugging_face.prepare(self.model, torch.float64)
        self.moment = Moment()
        self.randomness = Randomness(task.seed, self.moment, torch.device("cpu"), model=self.model)
        self.randomness.answers, self.randomness.checkpointing = Answers(self.randomness), RunOnce()
        self._begun = {name: tensor.detach().clone() for name, tensor in self._moved()}
        self._trainable = [name for name, weight in self.model.named_parameters() if weight.requires_grad]
        self.turns = tuple(dict.fromkeys(task.turns)) or ("",)
        self.turn = self.turns[0]

    def take(self, samples: Sequence[Any]) -> None:
        """These samples from here on, the shortest first: of two parts, one is shorter than the whole."""
        self.samples = sorted(samples, key=_size)

    def _made(self) -> tuple[nn.Module, bool]:
        """The model with weights of its own, made smaller if it is large; whether it was."""
        task = self.task
        described = Blueprint(task.model, task.seed).model
        weights, config = sum(p.numel() for p in described.parameters()), getattr(described, "config", None)
        if weights <= LARGE_WEIGHTS:
            return self._built(task), False
        if type(task).tiny is not Task.tiny:
            small = task.tiny()
        elif configs.is_config(config):
            small = next(by_config(task, described, config, Needs(), vocabulary=sys.maxsize)).task
            self.samples = [_short(sample) for sample in self.samples]
        elif weights <= TOO_MANY_WEIGHTS:
            return self._built(task), False
        else:
            raise CannotCheck(
                f"{self.name} has {weights:,} weights, too many to try it on the CPU first, and it is not known how to "
                "make it smaller: give it a tiny(), which returns a copy of itself with small sizes"
            )
        described = Blueprint(small.model, small.seed).model
        names = [name for name, weight in described.named_parameters() if weight.requires_grad]
        return self._built(fitted(small, names)[0]), True

    def _enough(self) -> int:
        """How many samples are computed: fewer where each is much work."""
        work = self.weights * max((t.numel() for t in tensors_in(self.samples[0])), default=1)
        if work > MOST_WORK:
            return FEWEST_SAMPLES
        if not self.changed and self.weights > LARGE_WEIGHTS:
            return FEW_SAMPLES
        return SOME_SAMPLES if work > MUCH_WORK else SAMPLES

    @staticmethod
    def _built(task: Task) -> nn.Module:
        seed_globally(task.seed, "check")
        return keras.build(building(task), task.seed)

    def _moved(self) -> Iterator[tuple[str, Tensor]]:
        """What a forward may change: buffers, and weights that nobody trains."""
        yield from self.model.named_buffers()
        yield from ((name, weight) for name, weight in self.model.named_parameters() if not weight.requires_grad)

    def in_turn(self) -> Iterator[None]:
        """For each of the task's turns, with the weights alone that it trains; then all are trained again."""
        weights = dict(self.model.named_parameters())
        for turn in self.turns:
            self.turn = turn
            for name in self._trainable:
                weights[name].requires_grad_(self.task.trains(turn, name))
            yield
        for name in self._trainable:
            weights[name].requires_grad_()

    @property
    def places(self) -> range:
        return range(len(self.samples))

    def batch(self, places: Sequence[int]) -> dict[str, Any]:
        """Some of the samples as a batch, which shares nothing with them."""
        chosen = [copied(self.samples[place]) for place in places]
        seed_globally(self.task.seed, "check collate")
        with raising(f"{self.name}.collate()"):
            tensors = (self.collate or self.task.collate)(chosen)
        made = Batch({name: mapped(self._placed, value) for name, value in tensors.items()})
        made.turn = self.turn
        return made

    def _placed(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone().to(self.dtype if tensor.is_floating_point() else tensor.dtype)

    def compute(
        self,
        places: Sequence[int],
        batch: dict[str, Any] | None = None,
        *,
        evaluate: bool = False,
        watch: bool = False,
        under: AbstractContextManager[Any] | None = None,
    ) -> Given:
        """What the task makes of some of the samples, beginning with the buffers that the model was made with.

        ``under``: a mode that sees each function as the user's code calls it.
        """
        batch = self.batch(places) if batch is None else batch
        if evaluate and isinstance(batch, Batch):
            batch.turn = ""
        self.moment.slots = np.array(places)
        for name, tensor in self._moved():
            if name in self._begun and self._begun[name].shape == tensor.shape:
                tensor.data.copy_(self._begun[name])
        given = Given(batch, None, None, None)
        wide = Widened() if self.dtype == torch.float64 else nullcontext()
        watching = self._watching(given) if watch else nullcontext()
        with watching, self.randomness.scope("task"), wide, under or nullcontext():
            with raising(f"{self.name}.inputs()"):
                given.inputs = cast(self.task.inputs(batch), self.dtype)
            with raising(f"the forward of {type(self.model).__name__}", type(self.task).model):
                given.output = called(self.model, given.inputs)
            if given.output is None:
                where = lines.at(lines.first_of(type(self.model).forward, type(self.task).model))
                raise RefusedAnyway(f"{silent(self.model)}{where}")
            method = "evaluate" if evaluate else "loss"
            with raising(f"{self.name}.{method}()"):
                given.value = getattr(self.task, method)(given.output, batch)
                if not evaluate:
                    as_loss(given.value, self.task)
        return given

    @contextmanager
    def _watching(self, given: Given) -> Iterator[None]:
        def ended(name: str) -> Any:
            def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                got = [tensor.detach().clone() for tensor in tensors_in((args, kwargs))]
                attached = any(tensor.requires_grad for tensor in tensors_in(output))
                given.modules.append(ModuleCall(name, module, got, mapped(_kept, output, (Tensor, Logits)), attached))

            return note

        hooks = [m.register_forward_hook(ended(n), with_kwargs=True) for n, m in self.model.named_modules()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def rest_batch_norms(self) -> None:
        """From here on they compute by their running averages, each sample by itself."""
        for module in self.model.modules():
            if isinstance(module, batchnorm.KINDS):
                module.train(False)

    def widen(self) -> None:
        """From here on in float64, and no weight 0: what differs shows. Where a task cannot, it stays as it was."""
        before, self.dtype = self.dtype, torch.float64
        self.model.double()
        kept = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        for disturbed in (True, False):
            try:
                with torch.no_grad():
                    self._disturb(kept) if disturbed else self._restore(kept)
                    given = self.compute(self.places)
                if bool(torch.isfinite(given.loss.total.detach()).all()):
                    return
            except (Fails, WrongUse):
                continue
        self.dtype = before
        self.model.to(before)

    def _disturb(self, kept: Mapping[str, Tensor]) -> None:
        source = torch.Generator().manual_seed(self.task.seed & 0x7FFFFFFF)
        for name, weight in self.model.named_parameters():
            if weight.is_floating_point():
                drawn = torch.rand(weight.shape, dtype=torch.float64, generator=source)
                if weight.ndim > 1:
                    weight.copy_(kept[name] + 0.1 * (drawn - 0.5))
                else:  # signs stay, so that what must be positive is
                    weight.copy_(kept[name] * (drawn + 0.5) + (kept[name] == 0) * (drawn - 0.5))

    def _restore(self, kept: Mapping[str, Tensor]) -> None:
        for name, weight in self.model.named_parameters():
            weight.copy_(kept[name])


def copied(sample: Any) -> Any:
    """A sample that shares nothing with another."""
    return copy.deepcopy(mapped(lambda tensor: tensor.detach(), sample))


def _kept(leaf: Tensor | Logits) -> Tensor:
    """A copy of what a module gives; of lazy logits, of what they are made of."""
    return (leaf.hidden if isinstance(leaf, Logits) else leaf).detach().clone()


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a structure; of lazy logits what they are made of."""
    return [leaf.hidden if isinstance(leaf, Logits) else leaf for leaf in leaves(value, (Tensor, Logits))]


def read(task: Task, data: Any, index: int) -> Any:
    """One sample, its own draws seeded as in training."""
    with raising(f"{type(task).__name__}.data()[{index}]"):
        return sample_at(data, index, task.seed)


def first_ids(task: Task, data: Any) -> list[int]:
    """The first samples that will be trained on."""
    with raising(f"{type(task).__name__}.data()"):
        order = training_order(task, data)
    return [int(index) for index in order.ids(0)[:SAMPLES]]


def _size(sample: Any) -> int:
    return sum(tensor.numel() for tensor in tensors_in(sample))


def _short(sample: Any) -> Any:
    """A sample with its sequences cut off: columns as long as the longest one of whole numbers."""
    if not isinstance(sample, dict):
        return sample
    flat = {n: v for n, v in sample.items() if isinstance(v, (Tensor, np.ndarray)) and v.ndim == 1}
    longest = max((len(v) for v in flat.values() if not torch.as_tensor(v).is_floating_point()), default=0)
    return {n: v[:SHORT] if n in flat and len(v) == longest else v for n, v in sample.items()}


def moved(before: Any) -> bool:
    """Whether torch's, numpy's or Python's own generators have drawn since."""
    return bool(before != generator_state(torch.device("cpu")))


def overrides(task: Any, method: str, base: type) -> bool:
    """Whether a task has a method of its own."""
    return inspect.unwrap(getattr(type(task), method)) is not getattr(base, method)
