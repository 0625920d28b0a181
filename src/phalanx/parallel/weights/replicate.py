"""The gradients' way: collected as backward makes them, summed over ranks while it goes on.

Every rank launches the same collectives in the same order, whatever its data made it use: buckets go strictly in turn,
and one that did not complete goes at the end of backward with zeros in the gaps. torch's fully_shard and DDP stop in
disorder when ranks differ in the parameters they used; here such a parameter just gets the other ranks' gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from itertools import islice

from torch import Tensor, nn

from phalanx.errors import WrongUse
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.pending import Pending
from phalanx.parallel.weights.bucket import Bucket
from phalanx.parallel.weights.coded import CodedGradients
from phalanx.parallel.weights.low_rank import LowRankGradients, LowRankSum
from phalanx.parallel.weights.shard import Gathering
from phalanx.parallel.weights.weight import Weight

AHEAD = 2
"""Buckets whose sums are expected before their own gradients are made."""


class Reduction:
    """Sums the buckets' gradients over the ``fsdp`` axis, each rank its rows, and then over ``dp``.

    Buckets are given in the order in which backward completes them. Where ranks do not keep whole gradients (ZeRO 2 and
    3), shards are summed after each micro-batch; otherwise after the last one.
    """

    def __init__(self, buckets: Sequence[Bucket], replicas: Communicator, gathering: Gathering | None) -> None:
        self.buckets, self.replicas, self.gathering = buckets, replicas, gathering
        self.on_gradient: Callable[[str, Tensor], None] | None = None
        """Told each gradient that this rank's own backward made, before it is summed over ranks."""
        self.unsettled: list[Callable[[], None]] = []
        """What is left to be done with a saved state that is being taken up."""
        if gathering is not None:
            gathering.on_done = self.done
        low_rank = [bucket.coded for bucket in buckets if isinstance(bucket.coded, LowRankGradients)]
        self._low_rank = LowRankSum(low_rank) if low_rank else None
        self._coded = [
            coded for bucket in buckets
            if (coded := bucket.coded) is not None and not coded.over_shards and coded not in low_rank
        ]  # fmt: skip
        self._coming: Iterator[CodedGradients] = iter(())
        """Those of them that have yet to be expected in this step."""
        self._names = [frozenset(weight.name for weight in bucket.trainable) for bucket in buckets]
        self._homes = {id(weight.full): (bucket, weight) for bucket in buckets for weight in bucket.trainable}
        self._hooks = [
            weight.full.register_post_accumulate_grad_hook(partial(self._arrived, bucket, weight, position))
            for position, bucket in enumerate(buckets)
            for weight in bucket.trainable
        ]

    def close(self) -> None:
        """Take the hooks off: a weight that holds one would keep everything behind it alive."""
        for hook in self._hooks:
            hook.remove()

    def encode(self, encoded: bool) -> None:
        """Whether gradients travel in few bits from the next step on, where they ever do."""
        for bucket in self.buckets:
            if bucket.coded is not None:
                bucket.coded.active = encoded

    def start_step(self, as_made: bool = False) -> None:
        """``as_made``: there is one micro-batch and one rank, and gradients may stay where backward makes them."""
        self.touched: set[str] = set()
        for bucket in self.buckets:
            bucket.clear(as_made)

    def expect(self) -> None:
        """Gradients will be summed in this step: say so to replicas before there are any."""
        self._coming = iter(self._coded)
        self._expect(AHEAD)

    def start_backward(self, last: bool, reached: Callable[[str], bool] | None = None, hold: bool = False) -> None:
        """A micro-batch begins; after the last one the gradients are the global sums.

        ``reached`` tells which weights this backward may reach, where it is one stage's. With ``hold`` nothing is
        summed at its end: more gradients will be brought by `deposit`.
        """
        if self.gathering is not None:
            self.gathering.start_backward()
        self._last, self._reached, self._hold = last, reached, hold
        self._done: set[int] = set()
        self._missing = [set(names) for names in self._names]
        """By position of a bucket: weights whose gradients have yet to come."""
        self._turn = 0
        self._scattering: tuple[Bucket, Pending] | None = None
        self._reducing: list[Pending] = []

    def _arrived(self, bucket: Bucket, weight: Weight, position: int, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is None:
            return  # it was left for `deposit`
        assert position >= self._turn, f"the gradient of {weight.name} came after its bucket was reduced"
        if not bucket.is_whole:
            raise WrongUse(
                f"backward used {weight.name} after it was let go: a module of its block gives its output in a form "
                "that cannot be followed. Give tensors, or lists, dicts or dataclasses of them; or use zero=2."
            )
        if self.on_gradient is not None:
            self.on_gradient(weight.name, gradient)
        bucket.collect(weight, gradient)
        parameter.grad = gradient = None  # its memory is free before the next is launched
        self.touched.add(weight.name)
        missing = self._missing[position]
        missing.discard(weight.name)
        if not missing and not (self.gathering and self.gathering.busy(bucket)):
            self.done(bucket)

    def done(self, bucket: Bucket) -> None:
        """Nothing more will come for this bucket in this backward."""
        if self._hold:
            if self.gathering is not None:
                self.gathering.finish(bucket)
            return
        self._done.add(id(bucket))
        while self._turn < len(self.buckets) and id(self.buckets[self._turn]) in self._done:
            self._launch(self.buckets[self._turn])
            self._turn += 1

    def finish_backward(self) -> None:
        """End a micro-batch: send what is left, and wait for all that is under way."""
        for bucket in self.buckets[self._turn :]:
            self.done(bucket)
        self._settle()
        if self._low_rank is not None:
            self._reducing += self._low_rank.start(self.replicas)
        for pending in self._reducing:
            pending.advance()
        for pending in self._reducing:
            pending.wait()
        if self.gathering is not None:
            self.gathering.in_step = False

    def deposit(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Bring a gradient that was left out of its backward."""
        bucket, weight = self._homes[id(parameter)]
        if self.on_gradient is not None:
            self.on_gradient(weight.name, gradient)
        bucket.collect(weight, gradient)
        self.touched.add(weight.name)

    def _due(self, bucket: Bucket) -> bool:
        if self._last or not bucket.trainable:
            return bool(bucket.trainable)
        reached = self._reached is None or any(self._reached(weight.name) for weight in bucket.trainable)
        return reached and not bucket.storage.whole_gradients

    def _launch(self, bucket: Bucket) -> None:
        due = self._due(bucket)
        if due or (bucket.trainable and bucket.partial is not None):
            bucket.complete()
        if due:
            if bucket.storage.ranks > 1:
                self._settle()  # one was on its way while the next was being made
                self._scattering = bucket, bucket.start_scatter()
            else:
                self.sum_over_replicas(bucket)
        if self.gathering:
            self.gathering.finish(bucket)

    def _settle(self) -> None:
        if self._scattering is not None:
            bucket, pending = self._scattering
            self._scattering = None
            pending.wait()
            if self._last:
                self.sum_over_replicas(bucket)

    def settle(self) -> None:
        """A saved state has been taken up."""
        for settle in self.unsettled:
            settle()
        self.unsettled.clear()
        for bucket in self.buckets:
            if bucket.coded is not None:
                bucket.coded.settle()

    def end_step(self, counts: bool, factor: float, without: Set[str]) -> None:
        """What is owed of gradients is so from now on, if the step counts; they will be ``factor`` times as large.

        ``without``: weights that it does not update.
        """
        for bucket in self.buckets:
            bucket.end_step(counts, factor, without)

    def _expect(self, buckets: int = 1) -> None:
        """Say to replicas that this rank is ready for what they will send of the next buckets."""
        for coded in islice(self._coming, buckets):
            coded.expect(self.replicas)

    def sum_over_replicas(self, bucket: Bucket) -> None:
        """Start the all-reduce of a bucket's gradients over ``dp``."""
        if bucket.as_made:
            return
        assert bucket.owned is not None
        if self._low_rank is not None and isinstance(bucket.coded, LowRankGradients) and bucket.coded.active:
            self._low_rank.add(bucket.coded, bucket.owned)
            return
        if bucket.coded is not None and not bucket.coded.over_shards:
            if self._reducing and self._reducing[-1].follows:
                self._reducing[-1].advance()  # it had the time that this one was being made
            self._reducing += bucket.coded.all_reduce(self.replicas, bucket.owned)
            self._expect()
            return
        if bucket.partial is None:
            self._reducing.append(self.replicas.all_reduce(bucket.owned))
            return
        if self._reducing:
            self._reducing[-1].advance()  # it had the time that this one was being made
        self._reducing.append(self.replicas.all_reduce_exactly(bucket.owned, bucket.storage.buffers))
