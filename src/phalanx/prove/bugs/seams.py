"""Seams: every place of the product where a bug may be planted.

A seam is a public attribute of a module or class. What it is today is `Seam.plain`; ``replace(seam, value)`` puts
something else there for a while. Functions at the end are for bugs that need not know how the product is called at a
seam: they hand over tensors and modules, so that a change of the product's interface is a change of this file alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from phalanx.checkpoint import state
from phalanx.checkpoint.state import State
from phalanx.data import loader
from phalanx.data.loader import Loader
from phalanx.data.order import Order
from phalanx.data.seeding import SampleReader
from phalanx.models import experts
from phalanx.models.transformer import FeedForward
from phalanx.parallel import spread
from phalanx.parallel.axes import batchnorm, context, heads
from phalanx.parallel.axes.context import ContextParallel
from phalanx.parallel.axes.pipeline import Pipeline
from phalanx.parallel.axes.samples import Samples
from phalanx.parallel.axes.transfers import Transfers
from phalanx.parallel.blocks import boundary
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.differentiable import Same
from phalanx.parallel.communication.pending import Pending
from phalanx.parallel.communication.traffic import Traffic
from phalanx.parallel.forward.activations import ActivationLayout
from phalanx.parallel.forward.wrapper import Around, wrap
from phalanx.parallel.randomness.draws import Randomness
from phalanx.parallel.spread import Spread
from phalanx.parallel.weights.bucket import Bucket
from phalanx.parallel.weights.gradients import Gradients
from phalanx.parallel.weights.holding import Holding
from phalanx.parallel.weights.replicate import Reduction
from phalanx.parallel.weights.weight import Weight
from phalanx.prove.replacing import replacing
from phalanx.train import engine, evaluate, step_agreement
from phalanx.train.checkpointing import Checkpointer
from phalanx.train.collecting import Collected
from phalanx.train.engine import Engine
from phalanx.train.scale import LossScale


@dataclass(frozen=True)
class Seam:
    """A public attribute that a bug may replace."""

    owner: ModuleType | type
    name: str
    what: str
    """What it does, in a line."""

    @property
    def plain(self) -> Any:
        """What is there now."""
        return getattr(self.owner, self.name)

    @property
    def path(self) -> str:
        if isinstance(self.owner, ModuleType):
            return f"{self.owner.__name__}.{self.name}"
        return f"{self.owner.__module__}.{self.owner.__qualname__}.{self.name}"


Replace = Callable[[Seam, Any], None]
"""``replace(seam, value)``"""


@contextmanager
def replaced() -> Iterator[Replace]:
    """What is replaced while this lasts is put back at its end."""
    with replacing() as put:
        yield lambda seam, value: put(seam.owner, seam.name, value)


# Spreading a model

FILL = Seam(spread, "fill", "give weights their initial values, a rank's part of each")
TENSOR_PARALLEL = Seam(spread, "TensorParallel", "have modules work with their tp parts")
EXPERT_PARALLEL = Seam(spread, "ExpertParallel", "have experts modules work with their ep part of the experts")
CONTEXT_PARALLEL = Seam(spread, "ContextParallel", "have blocks work with their cp positions")
BATCH_NORM = Seam(spread, "spread_batchnorm", "have batch-norms normalise over the samples of all ranks")
HEAD_SPANS = Seam(heads, "head_spans", "the rows of an attention projection that each tp rank gets")

# Forward and backward of a micro-batch

ACTIONS = Seam(Spread, "actions", "the forwards and backwards of a step, in order")
BACKWARD = Seam(Spread, "backward", "the backward of one action")
PENALTY_FACTOR = Seam(spread, "penalty_factor", "the factor of penalties in backward")
PENALISED = Seam(experts, "penalised", "bind a penalty to the stream")
FEED_FORWARD = Seam(FeedForward, "forward", "a feed-forward's output")
PIPELINE_START = Seam(Pipeline, "start", "begin a step's schedule")
PIPELINE_BACKWARD = Seam(Pipeline, "backward", "a stage's part of a backward")
RECEIVED = Seam(Transfers, "received", "the stream, or its gradient, that another stage sent")
TOGETHER = Seam(Samples, "together", "what a loss gathers of all micro-batches of all ranks")
SHARE_LOSS = Seam(ContextParallel, "share_loss", "have the loss compute this cp rank's positions alone")
DRAW_KEYS = Seam(Randomness, "keys", "the keys of random draws")
REPLAYED = Seam(Randomness, "replayed", "have what is computed here draw the same when it is computed again")
DRAW_GRID = Seam(ActivationLayout, "grid", "the coordinates of draws in the whole sample")

# Collectives

SHARED_SUM = Seam(
    step_agreement, "summed_over_ranks", "the all-reduce in which ranks agree on loss, count, norm and signals"
)
ALL_REDUCE = Seam(Communicator, "all_reduce", "sum over the ranks of an axis, in place")
REDUCE_SCATTER = Seam(Communicator, "reduce_scatter", "sum over the ranks of an axis, a part for each")
STREAM_GATHER = Seam(boundary, "all_gather", "all-gather of the stream after the last block, with gradients")
CP_GATHER = Seam(context, "all_gather", "all-gather of a dim over cp, with gradients")

# Gradients and weights

ADDING = Seam(Holding, "adding", "the tp ranks over which a weight's gradient is summed")
COMPLETE = Seam(Holding, "complete", "all-reduce partial gradients over tp and pp")
COUNTS = Seam(Holding, "counts", "whether this rank counts a weight in the gradient norm")
PART = Seam(Holding, "part", "this rank's part of a whole weight")
PAIRS = Seam(Weight, "pairs", "which rows of a weight lie where in a flat buffer")
NORM_SQUARED = Seam(Gradients, "norm_squared", "this rank's part of the squared norm of all gradients")
CLEAR = Seam(Bucket, "clear", "forget the last step's gradients")
END_STEP = Seam(Bucket, "end_step", "a bucket is told whether the step counts")
COLLECT = Seam(Bucket, "collect", "add a local gradient to its bucket")
START_GATHER = Seam(Bucket, "start_gather", "start the all-gather of a bucket's weights")
FINISH_GATHER = Seam(Bucket, "finish_gather", "wait for it")
START_BACKWARD = Seam(Reduction, "start_backward", "begin the reductions of a backward")
SUM_OVER_REPLICAS = Seam(Reduction, "sum_over_replicas", "start the all-reduce of a bucket over dp")
UPDATED = Seam(Spread, "updated", "after an update: gather what stays whole")

# Optimizer and step

LEARNING_RATE = Seam(Engine, "set_learning_rate", "set the schedule's rate of a step")
MAKE_OPTIMIZER = Seam(engine, "spread_optimizer", "the task's optimizer over this rank's shards")
STEP = Seam(Engine, "step", "one training step")

# Data and evaluation

EPOCH = Seam(Order, "epoch", "the epoch that a step is in")
IDS = Seam(Order, "ids", "the sample in each slot of a step")
SHARE = Seam(loader, "share", "the slots of each micro-batch of a rank")
SAMPLE = Seam(SampleReader, "read", "read one sample, its randomness seeded")
BATCHES = Seam(Loader, "batches", "this rank's batches, step by step")
PLANS = Seam(Loader, "plans", "what to read for a step's micro-batches")
TOTALS = Seam(evaluate, "totals_over_ranks", "totals and counts of an evaluation, over all ranks")
ROWS = Seam(Collected, "add", "note a measure's rows, with the samples they belong to")

# Saving and resuming

ENTRIES = Seam(State, "entries", "all that this rank saves")
WANTED = Seam(State, "wanted", "where saved tensors go on this rank")
BOXES = Seam(state, "boxes", "where a rank's rows of a weight lie in the whole")
COPY = Seam(Checkpointer, "copy", "copy staged state, while the next step runs")
WAIT_FOR_COPY = Seam(Checkpointer, "before_update", "before an update: wait until the copy is whole")
RESUME = Seam(Engine, "resume", "take up what was saved beside tensors")
LOSS_SCALE = Seam(LossScale, "restore", "take up the loss scale")


# Collectives, as bugs see them


def agreeing(replace: Replace, change: Callable[[Tensor, Tensor], None]) -> None:
    """Have ``change(own, agreed)`` spoil the one small sum in which ranks agree."""
    plain = SHARED_SUM.plain

    def summed(of: Any, numbers: Tensor) -> Tensor:
        own = numbers.clone()
        plain(of, numbers)
        if of.environment.world > 1 and numbers.shape == (step_agreement.AGREED,):
            change(own, numbers)
        return numbers

    replace(SHARED_SUM, summed)


def all_reducing(replace: Replace, bring: Callable[[Tensor], Tensor]) -> None:
    """Have ``bring`` say what this rank brings to an all-reduce."""
    plain = ALL_REDUCE.plain
    replace(ALL_REDUCE, lambda self, given, *rest: plain(self, bring(given), *rest))


def reduce_scattering(
    replace: Replace,
    bring: Callable[[Tensor], object] | None = None,
    keep: Callable[[Tensor, Tensor, str], None] | None = None,
) -> None:
    """Have ``bring(parts)`` spoil what this rank brings, or ``keep(output, own, axes)`` what it is given.

    ``own`` is what it brought for itself; ``axes`` is the name of the communicator, such as ``fsdpxcp``.
    """
    plain = REDUCE_SCATTER.plain

    def reduce_scatter(self: Any, output: Tensor, parts: Tensor, *how: Any, **also: Any) -> Pending:
        if bring is not None:
            bring(parts)
        if keep is None:
            return plain(self, output, parts, *how, **also)
        own = parts[self.rank].clone()
        plain(self, output, parts, *how, **also).wait()
        keep(output, own, self.name)
        return Pending()

    replace(REDUCE_SCATTER, reduce_scatter)


def gathering(
    replace: Replace, seam: Seam, change: Callable[[Tensor, Tensor, int, int, int], Tensor], *, state: Same
) -> None:
    """Have ``change(x, whole, dim, rank, ranks)`` be what gathering ``x`` gives, where it makes it replicated, or
    invariant, as ``state`` says."""
    plain = seam.plain

    def all_gather(x: Tensor, dim: int, total: int, group: Any, *, to: Same, **order: Any) -> Tensor:
        whole = plain(x, dim, total, group, to=to, **order)
        return change(x, whole, dim, group.rank, group.size) if to == state else whole

    replace(seam, all_gather)


# Modules of a spread model, as bugs see them


def planted_around(module: nn.Module, function: Callable[..., Any]) -> None:
    """Have ``function(plain, *given)`` be the module's own forward, inside of all that spreading adds to it."""
    wrap(module, Around("a planted bug", function))


def on_rows(replace: Replace, prepare: Callable[[nn.Module, int], None]) -> None:
    """Have ``prepare(module, ranks)`` change each linear whose input is cut over tp."""

    def all_of_them(plan: Any, model: nn.Module, group: Any) -> None:
        for name in plan.rows:
            prepare(model.get_submodule(name), group.size)

    _after_tensor_parallel(replace, all_of_them)


def on_embeddings(replace: Replace, prepare: Callable[[nn.Embedding, int], None]) -> None:
    """Have ``prepare(module, ranks)`` change each embedding whose vocabulary is cut over tp."""

    def all_of_them(plan: Any, model: nn.Module, group: Any) -> None:
        for name in plan.vocabulary:
            module = model.get_submodule(name)
            if isinstance(module, nn.Embedding):
                prepare(module, group.size)

    _after_tensor_parallel(replace, all_of_them)


def _after_tensor_parallel(replace: Replace, change: Callable[[Any, nn.Module, Any], None]) -> None:
    plain = TENSOR_PARALLEL.plain

    def made(plan: Any, model: nn.Module, group: Any, *rest: Any) -> Any:
        parallel = plain(plan, model, group, *rest)
        change(plan, model, group)
        return parallel

    replace(TENSOR_PARALLEL, made)


def on_experts(replace: Replace, prepare: Callable[[Any], None]) -> None:
    """Have ``prepare(module)`` change each experts module before its experts are divided over ep."""
    plain = EXPERT_PARALLEL.plain

    def made(model: nn.Module, anatomy: Any, *how: Any) -> Any:
        for name in anatomy.experts:
            prepare(model.get_submodule(name))
        return plain(model, anatomy, *how)

    replace(EXPERT_PARALLEL, made)


def on_blocks_of_cp(replace: Replace, prepare: Callable[[Any], None]) -> None:
    """Have ``prepare(block)`` change each block before it works with its cp positions."""
    plain = CONTEXT_PARALLEL.plain

    def made(model: nn.Module, anatomy: Any, *how: Any) -> Any:
        for name in anatomy.blocks:
            prepare(model.get_submodule(name))
        return plain(model, anatomy, *how)

    replace(CONTEXT_PARALLEL, made)


class FirstTime:
    """A moment at which nothing seems to be computed again."""

    recomputing = False

    def __init__(self, moment: Any) -> None:
        self._moment = moment

    def __getattr__(self, name: str) -> Any:
        return getattr(self._moment, name)


class AllReal(FirstTime):
    """A moment at which no sample seems to be a stand-in."""

    real = True


def on_batch_norms(
    replace: Replace,
    track: Callable[[Any], None],
    *,
    alone: bool = False,
    again: bool = False,
    padded: bool = False,
) -> None:
    """Have ``track(module)`` change each batch-norm after it has counted a batch.

    ``alone``: of this rank's samples. ``again``: one that is computed again counts again. ``padded``: samples that only
    stand in, so that a rank has something to compute, count as well.
    """
    plain = BATCH_NORM.plain

    def spread_batchnorm(model: nn.Module, group: Any, ranks: int, moment: Any) -> None:
        def counted(module: Any, *_: Any) -> None:
            if module.training and not moment.recomputing:
                track(module)

        seen = FirstTime(moment) if again else AllReal(moment) if padded else moment
        plain(model, *((Communicator(None, Traffic()), 1) if alone else (group, ranks)), seen)
        for module in model.modules():
            if isinstance(module, batchnorm.KINDS):
                module.register_forward_hook(counted)

    replace(BATCH_NORM, spread_batchnorm)


def sums_of_batch_norms_alone(replace: Replace) -> None:
    """Have a batch-norm's backward take its sums over this rank's samples, as many times as there are ranks."""
    plain = ALL_REDUCE.plain

    def all_reduce(self: Any, given: Tensor, *rest: Any) -> Pending:
        if given.ndim == 2 and given.shape[0] == 2:
            given.mul_(self.size)
            return Pending()
        return plain(self, given, *rest)

    replace(ALL_REDUCE, all_reduce)
