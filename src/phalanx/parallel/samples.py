"""The samples of a whole step, for losses that compare them: `gather`, which a task calls in its loss.

A rank has some rows of the global batch, and counts the loss of those; `gather` gives it everybody's, in the order in
which one device would have them. Gradients flow back to the rank that has the sample, summed over all that used it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from phalanx import losses
from phalanx.errors import WrongUse
from phalanx.losses import Logits
from phalanx.parallel import collectives
from phalanx.parallel.collectives import Group
from phalanx.parallel.differentiable import gather_rows
from phalanx.parallel.randomness import Moment

MOST_DIMS = 8
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip

calls = 0
"""How often anything asked for all samples since the process began: whoever divides a batch can tell that by it."""
_now: Samples | None = None
"""Those that are computed just now, by an engine."""


def gather(x: Tensor) -> Tensor:
    """``x`` of all samples of the global batch, in the order of one device; call it in ``Task.loss``.

    ``x`` has one row a sample. `rows` says which of them are this rank's own, whose loss it counts. Gradients flow
    back. Where no engine computes, a batch is all there is, and ``x`` is given back.
    """
    global calls
    calls += 1
    return x if _now is None else _now.gathered(x)


def rows(x: Tensor) -> Tensor:
    """Which rows of ``gather(x)`` are those of ``x``: the classes of a contrastive loss, for example."""
    if _now is None:
        return torch.arange(len(x), device=x.device)
    return _now.own(x)


class Samples:
    """The samples of a step, and which of them this rank has."""

    def __init__(self, group: Group | None, moment: Moment) -> None:
        self.group, self.moment = group, moment
        self.micro_batches = 1
        self._sizes: Callable[[], Sequence[int]] | None = None
        self._in_loss = False
        self.used = False
        """Whether ranks have sent each other samples."""

    def start(self, micro_batches: int, sizes: Callable[[], Sequence[int]] | None) -> None:
        """Before a step, or a batch of an evaluation: how many samples of it each rank has.

        None where ranks do not share it: then each has all that there are.
        """
        self.micro_batches, self._sizes = micro_batches, sizes

    @contextmanager
    def computed(self) -> Iterator[None]:
        """While a micro-batch is computed."""
        global _now
        outer, _now = _now, self
        try:
            yield
        finally:
            _now = outer

    @contextmanager
    def in_loss(self) -> Iterator[None]:
        """While something is made of the model's output."""
        self._in_loss = True
        with losses.counted_by(self._counts):
            try:
                yield
            finally:
                self._in_loss = False

    def gathered(self, x: Tensor) -> Tensor:
        x = x.tensor() if isinstance(x, Logits) else x
        self._check(x)
        if self._sizes is None or self.group is None:
            return x
        self.used = True
        self._check_alike(x, self.group)
        return gather_rows(x, self._sizes(), self.group, counts=self.moment.real)

    def own(self, x: Tensor) -> Tensor:
        self._check(x)
        if self._sizes is None:
            return torch.arange(len(x), device=x.device)
        return torch.from_numpy(self.moment.slots).to(x.device)

    def _check(self, x: Tensor) -> None:
        if not self._in_loss:
            raise WrongUse(
                "phalanx.gather is called in the model's forward, where ranks may hold parts of samples or compute "
                "them again. Return what you want to gather from forward, and gather it in Task.loss."
            )
        if self.micro_batches > 1:
            raise WrongUse(
                f"phalanx.gather needs the whole global batch at once, and this layout cuts it into "
                f"{self.micro_batches} micro-batches, computed one after another. Leave micro_batch and exact out of "
                "the layout; to save memory, spread the batch over more ranks of dp or fsdp, or set recompute=full."
            )
        samples = len(self.moment.slots)
        if not isinstance(x, Tensor) or not x.ndim or len(x) != samples:
            found = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise WrongUse(
                f"phalanx.gather got {found}, and this rank has {samples} samples. Give it a tensor with one row a "
                "sample, as its first dim."
            )

    def _check_alike(self, x: Tensor, group: Group) -> None:
        """All ranks find out alike if their rows do not fit together, before they would hang over it."""
        if x.dtype not in DTYPES or x.ndim > MOST_DIMS:
            raise WrongUse(
                f"phalanx.gather cannot send a tensor of {x.dtype} and {x.ndim} dims. Give it real or whole numbers of "
                f"at most {MOST_DIMS} dims."
            )
        own = [DTYPES.index(x.dtype), x.requires_grad, x.ndim, *x.shape[1:]]
        header = torch.tensor(own + [0] * (3 + MOST_DIMS - len(own)), device=x.device)
        every = header.new_empty(group.size(), len(header))
        collectives.all_gather(every, header, group).wait()
        found = {tuple(row) for row in every.tolist()}
        if len(found) > 1:
            shapes = sorted({str(tuple(row[3 : 2 + row[2]])) for row in found})
            raise WrongUse(
                f"phalanx.gather got rows that differ between ranks (shapes of a sample: {', '.join(shapes)}). Make "
                "them alike: pad to one length in Task.data or collate, and gather the same things on every rank."
            )

    def _counts(self, own: Tensor) -> Tensor | None:
        """How many terms several losses have in the global batch; None where that is not known before a backward."""
        if self.micro_batches > 1:
            return None
        if self._sizes is None:
            return own
        total = own * self.moment.real
        collectives.all_reduce(total, self.group).wait()
        return total
