"""The samples of a whole step, for losses that compare them: what `phalanx.gather` gives while an engine computes.

A rank has some rows of the global batch, and counts the loss of those; `gather` gives it everybody's, in the order in
which one device would have them. Gradients flow back to the rank that has the sample, summed over all that used it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import WrongUse
from phalanx.gathering import answered_by
from phalanx.layout import Layout
from phalanx.logits import Logits
from phalanx.loss import counted_by
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.differentiable import all_gather_rows
from phalanx.parallel.randomness.draws import Moment

Spans = list[list[tuple[int, int]]]
"""By rank and micro-batch, which slots of the global batch it has, from and to."""
Kind = Literal["rows", "counts"]
Whose = str | None
"""The turn that a loss is of, empty where steps take no turns; None: an evaluation."""
MOST_DIMS = 8
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip

SAME_NAMES = (
    "Give it every name in every micro-batch, in one order: a loss that does not occur there has a total of "
    "0 * output.sum() and a count of 0."
)


class AtOnce(BaseException):
    """Leaves a step whose micro-batches were computed one by one: its loss needs all of them at the same time."""


class Asked(BaseException):
    """Leaves a loss where it needs what other micro-batches bring."""

    def __init__(self, kind: Kind, value: Tensor) -> None:
        super().__init__()
        self.kind, self.value = kind, value.detach()


@dataclass
class LossAnswers:
    """What a loss is told that is computed once more, from the first thing it asks for."""

    known: list[Tensor]
    given: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By number: what was asked with, and what was told, where gradients come to both."""
    _next: int = 0

    def answer(self, kind: Kind, value: Tensor) -> Tensor:
        number, self._next = self._next, self._next + 1
        if number == len(self.known):
            raise Asked(kind, value)
        told = self.known[number].detach()
        if value.requires_grad:
            told.requires_grad_()
            self.given[number] = value, told
        return told


@dataclass
class Known:
    """What has turned out of one turn's loss, or of the evaluation."""

    all_at_once: bool = False
    """It needs all micro-batches at the same time."""
    names: list[str] | None = None
    """Of the losses that it is the sum of, on every stage."""
    sums: list[list[str]] = field(default_factory=list)
    """The names that each `losses.sum` in it gets, call by call, as all ranks have agreed."""
    ended: bool = False
    """All ranks have agreed that there are no more of them."""


class Samples:
    """The samples of a step, and which of them this rank has."""

    def __init__(self, group: Communicator, moment: Moment, layout: Layout) -> None:
        self.group, self.moment = group, moment
        self.micro_batches = 1
        self.known = Known()
        """Of what is computed now."""
        self.used = False
        """Whether ranks have sent each other samples."""
        self.answers: LossAnswers | None = None
        """While the loss of one of several micro-batches is computed."""
        self.repeats = layout.pp == 1 and not layout.exact
        """Whether a step can be begun again when its loss turns out to need all micro-batches."""
        self._known: dict[Whose, Known] = {}
        self._spans: Callable[[], Spans] | None = None
        self._in_loss = False
        self._sums = 0
        """How often the loss has called `losses.sum` so far."""

    def start(self, whose: Whose, micro_batches: int, spans: Callable[[], Spans] | None) -> None:
        """Before a step, or a batch of an evaluation: which samples of it each rank has.

        None where ranks do not share it: then each has all that there are.
        """
        self.known = self._known.setdefault(whose, Known())
        self.micro_batches, self._spans = micro_batches, spans

    @property
    def all_at_once(self) -> bool:
        """Whether the loss of any turn has turned out to need all micro-batches at the same time."""
        return any(known.all_at_once for whose, known in self._known.items() if whose is not None)

    def computed(self) -> AbstractContextManager[None]:
        """While a micro-batch is computed."""
        return answered_by(self)

    @contextmanager
    def in_loss(self, answers: LossAnswers | None = None) -> Iterator[None]:
        """While something is made of the model's output."""
        self._in_loss, self.answers, self._sums = True, answers, 0
        with counted_by(self._counts):
            try:
                yield
            finally:
                self._in_loss, self.answers = False, None

    def gathered(self, x: Tensor) -> Tensor:
        x = x.tensor() if isinstance(x, Logits) else x
        self._check(x)
        if self.micro_batches > 1:
            self.need_all("phalanx.gather needs the whole global batch at once")
            assert self.answers is not None
            return self.answers.answer("rows", x)
        if self._spans is None:
            return x
        return self._of_all(x)

    def own(self, x: Tensor) -> Tensor:
        self._check(x)
        if self._spans is None:
            return torch.arange(len(x), device=x.device)
        if self.group.alone and self.micro_batches == 1:
            self._check_complete(len(x))
        every = sorted(slot for ranges in self._spans() for start, stop in ranges for slot in range(start, stop))
        return torch.tensor(np.searchsorted(every, self.moment.slots), device=x.device)

    def need_all(self, why: str) -> None:
        """Compute the step again, with all micro-batches at once; refused where that cannot be done."""
        if not self.repeats:
            raise WrongUse(
                f"{why}, and this layout cuts it into {self.micro_batches} micro-batches in a pipeline or for exact "
                "sums. Give pp one micro-batch (leave micro_batch out), use fsdp instead of pp, or leave exact out."
            )
        if self.answers is None:
            self.known.all_at_once = True
            raise AtOnce

    def together(self, kind: Kind, parts: Sequence[Tensor], like: Tensor) -> tuple[Tensor, Tensor]:
        """What all micro-batches of all ranks bring, and this rank's part of it, through which gradients flow back."""
        if kind == "counts":
            own = torch.stack([torch.zeros_like(like), *parts]).sum(0)
            total = own.clone()
            self.group.all_reduce(total).wait()
            return total, own
        own = torch.cat([like[:0], *parts]).requires_grad_(like.is_floating_point())
        return own if self._spans is None else self._of_all(own), own

    def _of_all(self, own: Tensor) -> Tensor:
        """Everybody's rows in the order of slots, from what each has in the order of its micro-batches."""
        assert self._spans is not None
        spans = self._spans()
        brought = len(own) if self.moment.real or self.micro_batches > 1 else 0
        if self.group.alone:
            self._check_complete(brought)
        else:
            self.used = True
            self._check_alike(own, self.group, brought)
            sizes = [sum(stop - start for start, stop in ranges) for ranges in spans]
            own = all_gather_rows(own, sizes, self.group, counts=self.moment.real or self.micro_batches > 1)
        slots = [slot for ranges in spans for start, stop in ranges for slot in range(start, stop)]
        if slots == sorted(slots):
            return own
        return own[torch.tensor(slots, device=own.device).argsort()]

    def _check_complete(self, *brought: int) -> None:
        """Refuse to gather from a batch of which samples were left out: others count on them. By rank."""
        assert self._spans is not None
        planned = [sum(stop - start for start, stop in ranges) for ranges in self._spans()]
        missing = sum(planned) - sum(brought)
        if missing > 0:
            raise WrongUse(
                f"{missing} of the samples of this step could not be read and are left out, and the loss "
                "gathers all of them. Leave them out of data() instead, and bad_rows=skip."
            )

    def _check(self, x: Tensor) -> None:
        if not self._in_loss:
            raise WrongUse(
                "phalanx.gather is called in the model's forward or in Task.inputs, where ranks may hold parts of "
                "samples or compute them again. Return it from forward, and gather it in Task.loss."
            )
        samples = len(self.moment.slots)
        if not isinstance(x, Tensor) or not x.ndim or len(x) != samples:
            found = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise WrongUse(
                f"phalanx.gather got {found}, and this rank has {samples} samples. Give it a tensor with one row a "
                "sample, as its first dim."
            )

    def _check_alike(self, x: Tensor, group: Communicator, brought: int) -> None:
        """All ranks find out alike if rows do not fit together or are missing, before they would hang over it."""
        if x.dtype not in DTYPES or x.ndim > MOST_DIMS:
            raise WrongUse(
                f"phalanx.gather cannot send a tensor of {x.dtype} and {x.ndim} dims. Give it real or whole numbers of "
                f"at most {MOST_DIMS} dims."
            )
        own = [DTYPES.index(x.dtype), x.requires_grad, x.ndim, *x.shape[1:]]
        header = torch.tensor([*own, *[0] * (3 + MOST_DIMS - len(own)), brought], device=x.device)
        every = group.gathered(header).tolist()
        self._check_complete(*(row.pop() for row in every))
        found = {tuple(row) for row in every}
        if len(found) > 1:
            shapes = sorted({str(tuple(row[3 : 2 + row[2]])) for row in found})
            raise WrongUse(
                f"phalanx.gather got rows that differ between ranks (shapes of a sample: {', '.join(shapes)}). Make "
                "them alike: pad to one length in Task.data or collate, and gather the same things on every rank."
            )

    def ended(self) -> None:
        """The loss of a micro-batch has come to its end: it has called `losses.sum` as often as all others."""
        if not self.known.ended or self._sums < len(self.known.sums):
            self._agree([])

    def _agree(self, names: list[str]) -> None:
        """All ranks find out alike if they sum other losses, or none, before they would mix up what they count.

        That is found out once; from then on every rank knows by itself.
        """
        if self._spans is None:
            return
        number, self._sums = self._sums, self._sums + 1
        known = self.known
        if known.ended or number < len(known.sums):
            before = known.sums[number] if number < len(known.sums) else []
            if names != before:
                raise WrongUse(
                    f"phalanx.losses.sum gets {_listed(names)} here, and got {_listed(before)} before. {SAME_NAMES}"
                )
            return
        every = self.group.all_gather_words(names)
        other = next((given for given in every if given != every[0]), None)
        if other is not None:
            first, second = _listed(every[0]), _listed(other)
            raise WrongUse(f"phalanx.losses.sum gets {first} on some ranks and {second} on others. {SAME_NAMES}")
        if names:
            known.sums.append(names)
        else:
            known.ended = True

    def _counts(self, names: list[str], own: Tensor) -> Tensor | None:
        """How many terms several losses have in the global batch; None where that is not known before a backward."""
        self._agree(names)
        if self.micro_batches > 1:
            return None if self.answers is None else self.answers.answer("counts", own)
        if self._spans is None:
            return own
        total = own * self.moment.real
        self.group.all_reduce(total).wait()
        return total


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "nothing"
