"""The Task: what to train, written as if there were one device.

A task is a dataclass; its fields are its settings. It never asks for a rank: everything that must know how the job is
spread (meshes, devices, launchers) knows the task, not the other way round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from phalanx import schedules
from phalanx.adamw import AdamW
from phalanx.anatomy import Anatomy
from phalanx.errors import WrongUse, closest
from phalanx.kernels.moments import Moments
from phalanx.losses import Loss
from phalanx.parameters import ParameterGroup, check_parameters, settings_of

if TYPE_CHECKING:
    from phalanx.callbacks import Callback
    from phalanx.questions import Questions

Precision = Literal["fp32", "bf16", "fp16", "fp8", "fp8_rowwise", "float64"]
OptimizerKind = Literal["adamw", "muon"]
BadRows = Literal["stop", "skip"]
"""What becomes of rows and samples that cannot be read: the first ends it, or they are left out."""
LastBatch = Literal["keep", "drop", "merge"]
"""What becomes of an epoch's last samples, too few for a global batch: a smaller one, none, part of the one before."""


class NoSuchColumn(WrongUse, KeyError):
    """A task asked a batch for what it does not have."""

    __str__ = ValueError.__str__


class Batch(dict[str, Any]):
    """A batch's columns by name."""

    turn = ""
    """Whose turn it is in this step, where a task has turns; empty in an evaluation."""

    def __missing__(self, name: str) -> Any:
        raise NoSuchColumn(f"the batch has no {name!r}; {closest(str(name), self)}")


MOST = 2**48
"""Of anything that is counted: numbers of samples and steps are multiplied, and must fit into 64 bits."""


@dataclass(kw_only=True)
class Task:
    """What to train. Give ``model``, ``data``, ``inputs`` and ``loss``; the rest has defaults."""

    seed: int = 0
    global_batch: int = 32
    steps: int = 100
    epochs: float = 0.0
    precision: Precision = "fp32"
    learning_rate: float = 1e-3
    warmup_steps: int = 10
    rate: str = "cosine"
    """How the learning rate goes on after the warm-up: a name of `schedules`, with options if it has some."""
    weight_decay: float = 0.1
    optimizer_kind: OptimizerKind = "adamw"
    """Or Muon for matrices of the model's blocks, and AdamW for the rest."""
    moments: Moments = "float32"
    layer_decay: float = 1.0
    """The learning rate falls by this factor from each block to the one before it."""
    parameters: dict[str, ParameterGroup] = field(default_factory=dict)
    """By patterns of weights' names, what is other for them; later ones before earlier ones."""
    clip: float = 1.0
    workers: int = 0
    bad_rows: BadRows = "stop"
    last_batch: LastBatch = "keep"
    balance: str = ""
    """A column of classes that are trained on equally often."""
    evaluate_every: int = 0
    keep_best: str = ""
    """A measure of `evaluate`, such as ``dice`` or ``min:error``: the checkpoint where it is best is kept beside those
    of ``--keep``, and the run ends with its weights."""

    counts: ClassVar[str] = "samples"
    """What a loss counts, for the screen: ``samples`` or ``tokens``."""
    turns: ClassVar[Sequence[str]] = ()
    """Modules that steps train in turn, one a step, such as ``("discriminator", "generator")``; else all at once."""

    def model(self) -> nn.Module:
        """The model, built as for one device; its constructor's own initialisation is kept."""
        raise self._missing("model", "return an nn.Module")

    def pretrained(self) -> str | Path | Mapping[str, Path] | None:
        """Where to begin: a folder of safetensors files with the model's own names, or None for its own weights.

        Or several folders, by what names of the model have before those in the files: ``{"teacher.": folder}``.
        """
        return None

    def added(self, weight: str) -> bool:
        """Whether a weight is the task's own addition to the model, which `pretrained` does not have."""
        return False

    def begins(self, weight: str, read: Callable[[str], Tensor]) -> Tensor | None:
        """What an added weight begins as, None: as it is made. ``read`` gives a pretrained one, whole."""
        return None

    def write_along(self, folder: Path) -> None:
        """Write what belongs to exported weights into their folder, as a tokenizer."""

    def data(self) -> Any:
        """The training samples: anything with ``len()`` and ``[i]`` -> dict of tensors or numbers."""
        raise self._missing("data", "return something with len() and [i] -> dict of tensors or numbers")

    def prepare(self) -> None:
        """Have ready what `data` needs: called once on each host, in the process that its ranks are forked from.

        What it keeps in the task all of them have; it must leave no thread running and no file open that they share.
        What is wrong with the data is said here before any of them starts.
        """

    def sample_weights(self, data: Any) -> Sequence[float] | Tensor | None:
        """How often each sample is drawn, relative to others, as torch's `WeightedRandomSampler` is told; None: alike.

        ``data``: the training samples. One number from 0 up for each; they are drawn with replacement.
        """
        return None

    def held_out(self) -> Any:
        """Samples kept aside for `evaluate`, or None."""
        return None

    def beforehand(self) -> Callable[[Any, dict[str, Any]], Mapping[str, Tensor]] | None:
        """What to compute of every sample before the first step, held-out ones too; None: nothing.

        A function of a batch's output and the batch, as `evaluate` is one, that gives tensors by name with a row a
        sample. It is called with the weights that training begins with; from then on samples have its rows under those
        names. Batches that it is called with do not have them.
        """
        return None

    def overview(self) -> tuple[dict[str, str], list[str]]:
        """What rank 0 says of the task's data before the first step: facts by short names, and notes; a line each."""
        return {}, []

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Samples to one batch; by default tensors and numbers are stacked."""
        try:
            return dict(torch.utils.data.default_collate(list(samples)))
        except (RuntimeError, TypeError) as error:
            raise WrongUse(
                f"the samples of {type(self).__name__} do not stack into a batch ({str(error).splitlines()[0]}). "
                "Make them alike, or give the task a collate(samples)."
            ) from error

    def inputs(self, batch: dict[str, Any]) -> Any:
        """What ``forward`` gets: a tensor, a tuple or a dict."""
        raise self._missing("inputs", "return what forward gets: a tensor, a tuple or a dict")

    def loss(self, output: Any, batch: dict[str, Any]) -> Loss:
        """The loss of a micro-batch as a sum and a count."""
        raise self._missing("loss", "return a phalanx.Loss(total, count)")

    def evaluate(self, output: Any, batch: dict[str, Any]) -> Mapping[str, Loss | Tensor | list[str] | list[Tensor]]:
        """What to measure on held-out data, by name; by default the loss.

        A sum and a count is reported as their ratio. A tensor with a row a sample, or a list with a string or a tensor
        a sample, is gathered for `summarise`. Tensors of a list may differ in their first dim, as boxes of images do.
        """
        return {"loss": self.loss(output, batch)}

    def summarise(self, gathered: dict[str, Any]) -> dict[str, float]:
        """Numbers that follow from all held-out samples together, such as an AUC.

        ``gathered`` has what `evaluate` gave to be gathered, by name: every sample once, in the order of the data, on
        the CPU.
        """
        names = ", ".join(map(repr, gathered))
        raise WrongUse(
            f"{type(self).__name__}.evaluate gives a tensor or a list for {names}, and there is no summarise() to make "
            "numbers of it. Define summarise(self, gathered) -> dict of numbers; for a sum over the batch return "
            "phalanx.Loss(total, count)."
        )

    def questions(self) -> Questions | None:
        """Of held-out data, what a causal language model is asked at evaluations, or None."""
        return None

    def turn(self, step: int) -> str:
        """Whose turn a step is; empty where there are none."""
        return self.turns[step % len(self.turns)] if self.turns else ""

    def trains(self, turn: str, weight: str) -> bool:
        """Whether a weight is updated in a turn; by default, whether it is in the module of that name."""
        return not turn or weight.startswith(f"{turn}.")

    def optimizer(self, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]:
        """The optimizer, or several by name. Each parameter has a ``.logical_name`` and its number of dims.

        Where one of them does not update each element by itself, parameters have their whole shapes under any layout.
        It may be called several times, with stand-ins first: what it returns must follow from ``params`` alone.
        """
        if self.optimizer_kind == "muon":
            return self._muon(params)
        return self._adamw(params)

    def _adamw(self, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """Matrices decay, the rest does not."""
        groups = [
            {"params": [p for p in params if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        if self.moments == "float32":
            return torch.optim.AdamW(groups, lr=self.learning_rate, fused=True)
        return AdamW(groups, lr=self.learning_rate, moments=self.moments, seed=self.seed)

    def _muon(self, params: Sequence[nn.Parameter]) -> dict[str, torch.optim.Optimizer]:
        """Matrices of blocks by Muon, its steps as long as AdamW's would be, so that one learning rate is for all."""
        hidden = [p for p in params if p.ndim == 2 and settings_of(p).in_block]
        chosen = {id(p) for p in hidden}
        rest = [p for p in params if id(p) not in chosen]
        if not hidden:
            raise WrongUse(
                f"optimizer_kind=muon updates matrices of repeated blocks, and {type(self).__name__} trains none that "
                "are known. Name the blocks: anatomy(model) returns phalanx.Anatomy.of(model, blocks='layers.*')."
            )
        numbers = {"lr": self.learning_rate, "weight_decay": self.weight_decay}
        muon = torch.optim.Muon(hidden, adjust_lr_fn="match_rms_adamw", **numbers)  # type: ignore[arg-type]
        return {"muon": muon, "adamw": self._adamw(rest)} if rest else {"muon": muon}

    def schedule(self) -> Callable[[int], float] | Mapping[str, Callable[[int], float]]:
        """A factor on the learning rate as a pure function of the step; by default warm-up, then as ``rate`` says.

        Where there are turns it may be a dict of such functions, one for each.
        """
        return schedules.schedule(self.rate, self.steps, self.warmup_steps)

    def plan_steps(self, samples: int, steps_in: Callable[[float], int]) -> None:
        """Where epochs are given, set ``steps`` to as many as they take: ``steps_in`` says so of any number."""
        if not self.epochs:
            return
        each, steps = steps_in(1), steps_in(self.epochs)
        unset = next(f.default for f in fields(self) if f.name == "steps")
        if self.steps not in (unset, steps):
            raise WrongUse(
                f"steps={self.steps} and epochs={self.epochs:g} do not agree: an epoch of {samples:,} samples has "
                f"{each:,} steps, which makes {steps:,}. Give one of the two."
            )
        self.steps = steps

    def callbacks(self) -> list[Callback]:
        """What is done beside training: a list of `phalanx.Callback`, called on every rank in this order."""
        return []

    def tiny(self) -> Task:
        """The same task with small sizes, for `phalanx prove`: structure kept, a second to train on one core."""
        return self

    def anatomy(self, model: nn.Module) -> Anatomy:
        """What the model consists of. Override to give rules: ``return Anatomy.of(model, blocks="trunk.*")``."""
        return Anatomy.of(model)

    def check(self) -> None:
        """Refuse settings that cannot work."""
        self._check_written()
        bounds = {"global_batch": 1, "steps": 0, "warmup_steps": 0, "workers": 0, "evaluate_every": 0}
        for name, least in bounds.items():
            value = getattr(self, name)
            if value < least:
                raise WrongUse(f"{name}={value} is below {least}. Set {name} to {least} or more.")
        for name in (*bounds, "seed"):
            if not -MOST <= getattr(self, name) <= MOST:
                raise WrongUse(f"{name}={getattr(self, name)} is too large to count. Set {name} to at most {MOST}.")
        if not 0 <= self.epochs <= MOST:
            raise WrongUse(f"epochs={self.epochs} is no number of passes. Set epochs above 0, or to 0 and give steps.")
        for name in ("learning_rate", "weight_decay"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise WrongUse(f"{name}={value} is no rate. Set {name} to a number from 0 up, such as 0.001.")
        if not self.clip > 0:
            raise WrongUse(f"clip={self.clip} would stop all learning. Set clip above 0, or clip=inf for no clipping.")
        kinds = {
            "precision": Precision, "moments": Moments, "optimizer_kind": OptimizerKind, "bad_rows": BadRows,
            "last_batch": LastBatch,
        }  # fmt: skip
        for name, kind in kinds.items():
            value, known = getattr(self, name), get_args(kind)
            if value not in known:
                raise WrongUse(f"{name}={value!r} is not known. Choose one of: {', '.join(known)}.")
        schedules.parsed(self.rate)
        check_parameters(self)

    def _check_written(self) -> None:
        """Refuse defaults that are written down and not taken, and numbers that are none."""
        kind = type(self)
        for own in fields(kind):
            holder = next((each for each in kind.__mro__ if own.name in vars(each)), Task)
            written = vars(holder).get(own.name)
            if own.default_factory is not MISSING and written is not None and not hasattr(written, "__get__"):
                raise WrongUse(
                    f"{own.name} = ... in {holder.__name__} is not taken. Put @dataclass above the class, and write "
                    f"it with its type: {own.name}: {own.type} = dataclasses.field(default_factory=lambda: ...)"
                )
            taken = written is own.default or written == own.default
            if taken or holder is Task or hasattr(written, "__get__") or own.default is MISSING:
                continue
            raise WrongUse(
                f"{own.name} = {written!r} in {holder.__name__} is not taken: {own.default!r} is. Put @dataclass "
                f"above the class, and write it with its type: {own.name}: {type(written).__name__} = {written!r}"
            )
        for own in fields(Task):
            value = getattr(self, own.name)
            number = isinstance(value, Real) and not isinstance(value, bool)
            if isinstance(own.default, (int, float)) and not number:
                raise WrongUse(f"{own.name}={value!r} is a {type(value).__name__}, not a number. Write a number.")

    def _missing(self, method: str, what: str) -> WrongUse:
        return WrongUse(f"{type(self).__name__} has no {method}(). Define it: {what}.")


def rates(task: Task) -> Callable[[int], float]:
    """The factor on the learning rate of each step, as the task's schedule, or that of the step's turn, says."""
    found = task.schedule()
    if not isinstance(found, Mapping):
        return found
    known = set(task.turns)
    if not known or known != set(found):
        raise WrongUse(
            f"{type(task).__name__}.schedule has {', '.join(map(repr, found))}, and its turns are "
            f"{', '.join(map(repr, sorted(known))) or 'none'}. Give a function for each turn, or one for all."
        )
    return lambda step: found[task.turn(step)](step)


def called(model: nn.Module, inputs: Any) -> Any:
    """A model's output for what `Task.inputs` gave: a dict by name, a tuple in order, anything else alone."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def as_loss(value: Any, task: Task, method: str = "loss") -> Loss:
    """What a method of the task gave, checked: a scalar sum and how many terms it has."""
    name = f"{type(task).__name__}.{method}"
    how = "Return phalanx.Loss(total, count), for example phalanx.losses.cross_entropy(output, targets)."
    if isinstance(value, Tensor):
        raise WrongUse(f"{name} returned a tensor, which has no count to divide by. {how}")
    if not isinstance(value, Loss):
        raise WrongUse(f"{name} returned a {type(value).__name__}, not a sum and a count. {how}")
    if value.count is None or (isinstance(value.count, Tensor) and value.count.numel() != 1):
        raise WrongUse(f"{name} gave a Loss without a count of its terms, one number. {how}")
    if (method == "loss" and not isinstance(value.total, Tensor)) or torch.as_tensor(value.total).numel() != 1:
        shape = tuple(value.total.shape) if isinstance(value.total, Tensor) else type(value.total).__name__
        raise WrongUse(f"{name} has a total of shape {shape}; it must be one number, the sum over the batch. {how}")
    return value
