"""The Engine: a task spread by a layout, ready to step. For our own loop and for people with theirs.

engine = phalanx.Engine(task, phalanx.Layout(fsdp=4))
for batch in engine.batches():
    metrics = engine.step(batch)
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from phalanx.callbacks import Callback
from phalanx.checkpoint.frozen import Frozen
from phalanx.checkpoint.pretrained import beginning
from phalanx.checkpoint.weights import check_writable
from phalanx.comm_methods import TOLERANCE
from phalanx.data.adopted import collate_of, held_out_samples, stacks, training_samples
from phalanx.data.kinds import length
from phalanx.data.loader import Loader, StepBatch
from phalanx.data.order import Order
from phalanx.data.planned import training_order
from phalanx.errors import WrongUse
from phalanx.kernels.documents import remember
from phalanx.kernels.own_folder import keep_to_own
from phalanx.launch.environment import TIMEOUT, Environment
from phalanx.layout import Layout
from phalanx.parallel.axes.batchnorm import KINDS
from phalanx.parallel.communication.mesh import BATCH, Mesh
from phalanx.parallel.communication.traffic import Traffic
from phalanx.parallel.spread import Spread
from phalanx.parallel.torch_private import asked_channels_last, compiler_folders
from phalanx.parallel.weights.blueprint import Blueprint
from phalanx.parallel.weights.placement import Placement
from phalanx.parameters import building
from phalanx.precision import DTYPES
from phalanx.redact import learn_task
from phalanx.run import Run
from phalanx.task import Batch, Task
from phalanx.traces import explain
from phalanx.train import rounds
from phalanx.train.agreement import agree_on_kernels, agreed_hosts, check_agreement
from phalanx.train.ahead import Ahead
from phalanx.train.auto_comm import AutoComm
from phalanx.train.beforehand import join_beforehand
from phalanx.train.calling import Callbacks, Ended
from phalanx.train.changes import described
from phalanx.train.clock import Clock
from phalanx.train.evaluate import evaluate
from phalanx.train.graphs import StepGraphs
from phalanx.train.guard import Guard
from phalanx.train.logged import Logged
from phalanx.train.matrices import spread_optimizer
from phalanx.train.memory import Kept
from phalanx.train.numbers import Numbers
from phalanx.train.optimizers import make_schedule
from phalanx.train.parameter_groups import Clipping, LearningRates, frozen_first
from phalanx.train.scale import LossScale
from phalanx.train.signals import Signals
from phalanx.train.sites import Sites, SitesRound, agreed_weights
from phalanx.train.small_batches import single_sample
from phalanx.train.standing import facts_of, resume
from phalanx.train.steady import in_one_way, steady
from phalanx.train.step import Metrics, passes
from phalanx.train.step_agreement import StepSum
from phalanx.train.turns import Turns
from phalanx.train.update import Update
from phalanx.trees import mapped

VERSIONS = {"python": platform.python_version(), "torch": torch.__version__}


class Engine:
    """Everything one rank needs to train. Under torchrun or our own launchers it finds the other ranks by itself."""

    def __init__(
        self,
        task: Task,
        layout: Layout | str | None = None,
        *,
        device: str | None = None,
        timeout: timedelta = TIMEOUT,
        init_from: str | Path | None = None,
        guard: Guard | None = None,
        allow_changes: bool = False,
        traffic: Traffic | None = None,
        run: Run | None = None,
        evaluates: str = "",
        loss_tolerance: float = TOLERANCE,
    ) -> None:
        """``init_from``: a folder of safetensors files to begin from, instead of what `Task.pretrained` says.

        ``allow_changes``: go on from a saved state also where other samples are to come than were planned then.
        ``traffic``: where what this rank says to others is counted. ``run``: the folder, for callbacks to write to.
        ``evaluates``: the method, ``data`` or ``held_out``, whose samples are evaluated, where nothing is trained.
        ``loss_tolerance``: percent by which a loss may be higher for what ``comm=auto`` chooses.
        """
        learn_task(task)
        task.check()
        self.task, self.environment = task, Environment.detect()
        self.layout = (Layout.parse(layout) if isinstance(layout, str) else layout) or Layout(dp=self.environment.world)
        self.layout.check(task.global_batch, self.environment.world)
        self.dtypes, self.device = DTYPES[task.precision], self.environment.device(device)
        data = training_samples(task)
        self.order = self._in_order(data, "data") if evaluates else training_order(task, data)
        task.plan_steps(self.order.size, self.order.steps_in)
        self.schedule, self.guard, self.logged = make_schedule(task), guard or Guard(), Logged(self)
        self.loss_scale, self.loss_tolerance = LossScale(dynamic=task.precision == "fp16"), loss_tolerance
        self.step_number, self.samples, self.terms = 0, 0, 0.0
        """How many have been trained on: samples, and terms of their losses."""
        self.compared: int | None = None
        """When ranks that hold the same last found that they do."""
        self.good: int | None = None
        """The newest state that is known to be good: the step from it had a finite loss and gradient."""
        self.callbacks, self.run = Callbacks(task), run
        """The task's, and ours; the folder of the run, which loops of one's own may not have."""
        self.ended: Ended | None = None
        """Where a callback has ended the run, if one has."""
        self.signals = Signals()
        """What this rank tells all ranks with the next step's sum; its metrics have those of any rank."""
        self.timeout, self.init_from, self.traffic, self.evaluates = timeout, init_from, traffic or Traffic(), evaluates
        self.clock = Clock(self.device, self.traffic.doing)
        self.versions, self.allow_changes, self._waited, self.why = VERSIONS, allow_changes, 0.0, ""
        self.changes: list[str] = []
        """What is other than when the state was saved that it went on from."""
        self.other_samples = False
        """Whether other samples are to come than were planned then."""
        with ExitStack() as undo:  # what was made is taken apart again if something here fails
            self._spread(data, timeout, undo)
            self._undo = undo.pop_all()

    def _spread(self, data: Any, timeout: timedelta, undo: ExitStack) -> None:
        """Meet the other ranks and take this rank's part of the model, the optimizer and the data."""
        task = self.task
        if self.environment.join(self.device, timeout):
            undo.callback(self.environment.leave)
        if self.layout.exact:
            undo.callback(steady(self.device))
        if self.layout.compile != "none" or self.device.type == "cuda":
            keep_to_own(compiler_folders())
        check_agreement(self, "settings", "layout", "kernels", "callbacks")
        self.mesh = Mesh(self.layout, self.environment.rank, timeout, self.traffic, hosts=agreed_hosts(self))
        undo.callback(self.mesh.close)
        agree_on_kernels(self)
        blueprint = Blueprint(building(task), task.seed)
        self.anatomy = task.anatomy(blueprint.model)
        placement = Placement.of(blueprint.model, self.anatomy, self.layout.site, self.dtypes)
        described_weights, begun = dict(blueprint.model.named_parameters()), self.init_from or task.pretrained()
        self.reordered = [name for name, weight in described_weights.items() if asked_channels_last(weight)]
        """Weights that the model has in another memory format, such as channels_last."""
        self.reseeded = blueprint.reseeded
        """What the constructor has seeded torch's global generator with."""
        saved = None if begun is None else beginning(begun, blueprint.model, self.anatomy.tied, task)
        together = self.mesh.site(self.layout)
        self.spread = Spread(blueprint, placement, together, self.dtypes, self.device, task.seed, saved)
        self.frozen = Frozen(self.spread, begun, task.seed)
        """Weights that are in no checkpoint."""
        undo.callback(self.spread.close)
        undo.callback(self.callbacks.call, "close")
        self.callbacks.call("on_model", [name for name, trained in self.spread.trainable.items() if trained])
        first = frozen_first(described_weights)
        self.turns = Turns(task, self.spread.trainable, [*self.callbacks.tasks, *first])
        self.clipping = Clipping.of(task, described_weights)
        self._in_turn = {name: weight.full for name, weight in self.spread.weights.items() if weight.trainable}
        if task.turns and self.guard.spike:
            raise WrongUse("--spike holds a loss against the last ones, which are other turns' here. Leave it out.")
        shards, trained = self.turns.completed(self.spread.shards()), any(self.spread.trainable.values())
        watching, local = self.callbacks.tasks, self.layout.local
        self.kept = Kept.of(task, placement, self.dtypes, watching, described_weights, local)
        """What optimizer and callbacks will keep of each weight."""
        self.optimizer = spread_optimizer(task, self.spread, described_weights, shards, trained, self.kept)
        if self.layout.exact:
            in_one_way(self.optimizer, self.device)
        self.rates = LearningRates(self.optimizer)
        self.numbers, self.update = Numbers(self.optimizer), Update(self.optimizer, self.spread, task.steps)
        self.auto_comm = AutoComm(self)
        self.step_sum = StepSum(self.spread.mesh.world, slow=bool(self.layout.coded_axis))
        self.graphs = StepGraphs(self, partial(passes, self))
        undo.callback(self.graphs.forget)  # NCCL ends no communicator that a graph still uses
        self.loader, self.to_device = self.loader_of(data, self.order), Ahead(self._place, self.device)
        normed = any(isinstance(module, KINDS) for module in self.spread.model.modules())
        self.spread.moment.single = single_sample(self.loader, task.steps) if normed and not self.evaluates else ""
        check_agreement(self, "data", "model")
        check_writable(self.spread)
        self.sites = None if local is None else Sites(self, local)
        """Their agreement, where each trains by itself."""
        self.described = described(self)
        join_beforehand(self)

    def loader_of(self, data: Any, order: Order) -> Loader:
        """This rank's part of a data set's batches, in an order."""
        return Loader(
            data, collate_of(self.task, data), order, micro_batches=self.layout.micro_batches(self.task.global_batch),
            ranks=self.mesh.size(*BATCH), rank=self.mesh.index(*BATCH), workers=self.task.workers,
            pin=self.device.type == "cuda", plain=stacks(self.task, data), bad_rows=self.task.bad_rows,
            leaves=self.layout.leaves(self.mesh.index(*BATCH)) if self.layout.exact else (),
            together=self.spread.mesh.size(*BATCH),
        )  # fmt: skip

    @property
    def model(self) -> nn.Module:
        """The task's model as this rank holds it: under some layouts a part of it, or parts of its weights."""
        return self.spread.model

    @property
    def rank(self) -> int:
        return self.environment.rank

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.environment.world

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that prints and writes what all have alike."""
        return self.rank == 0

    def batches(self) -> Iterator[StepBatch]:
        """This rank's batches from the next step to the task's last."""
        batches = self.to_device.read(self.loader.batches(self.step_number, self.task.steps))
        while True:
            started = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                return
            self._waited = time.perf_counter() - started
            yield batch

    def step(self, batch: StepBatch) -> Metrics:
        """Train on one batch."""
        self.spread.train()
        self.clock.start("forward")
        try:
            self.spread.refresh()
            metrics = rounds.step(self, batch)
        except Exception as error:
            explain(error, self.spread.model, self.task)
            raise
        metrics.turn = self.task.turn(batch.step)
        metrics.seconds = {"data": self._waited, **metrics.seconds}
        self.step_number = batch.step + 1
        self.samples += metrics.slots
        if self.sites is not None:
            metrics.round = self.sites.after_step(metrics)
        else:
            self.terms += metrics.count
            self.good = self.good if metrics.skipped else metrics.step
        self.callbacks.call("on_step", self, metrics)
        self.auto_comm.stepped(metrics)
        return metrics

    @property
    def just_agreed(self) -> range:
        """The steps since all ranks last agreed on what to do, up to this one; none where they do not now."""
        if self.sites is None:
            return range(self.step_number, self.step_number + 1)
        return self.sites.just_agreed

    def stop(self, why: str) -> None:
        """End the run after the next step, on all ranks; with sites, the next after which they agree.

        Any rank may ask for it, in a callback or between steps.
        """
        self.signals.finish, self.why = True, self.why or why

    def agree_to_end(self) -> Ended:
        """After a step with the signal to finish: the run ends here. All ranks must call it."""
        whys = [why for said in self.mesh.world.all_gather_words([self.why]) for why in said if why]
        self.ended = Ended(self.step_number, self.task.steps, whys[0] if whys else "a callback has ended it")
        return self.ended

    def undo_count(self, metrics: Metrics) -> None:
        """A step that changed nothing is not counted, and comes again."""
        self.step_number = metrics.step
        self.samples -= metrics.slots
        self.terms -= metrics.count

    def pass_over(self, batch: StepBatch) -> SitesRound | None:
        """Leave a batch out: the step is counted, nothing is learned from it. What sites did, after the last one."""
        self.step_number = batch.step + 1
        return None if self.sites is None else self.sites.pass_over()

    def facts(self) -> dict[str, Any]:
        """Where the run stands, beside its tensors: with both it can go on under any layout."""
        return facts_of(self)

    def resume(self, facts: Mapping[str, Any]) -> None:
        """Go on from where a run stood; its tensors are in place."""
        resume(self, facts)

    @cached_property
    def held_out(self) -> Loader | None:
        """The task's held-out data in order, or None."""
        return None if (data := held_out_samples(self.task)) is None else self.in_order(data, "held_out")

    def in_order(self, data: Any, method: str) -> Loader:
        """The samples that a method of the task gave, in order."""
        return self.loader_of(data, self._in_order(data, method))

    def _in_order(self, data: Any, method: str) -> Order:
        return Order(length(data, method, self.task), self.task.global_batch, self.task.seed, shuffle=False)

    def evaluate(self, batches: int | None = None, on_batch: Callable[[], None] = lambda: None) -> dict[str, float]:
        """The task's measures over its held-out data, or so many batches of it, every sample counted once."""
        if self.held_out is None:
            raise WrongUse(f"{type(self.task).__name__} keeps nothing aside to evaluate on. Give it a held_out().")
        try:
            self.spread.refresh()
            with self.callbacks.evaluating(self), agreed_weights(self):
                found = evaluate(self, self.held_out, batches, on_batch).results()
        except Exception as error:
            explain(error, self.spread.model, self.task)
            raise
        if batches is None and not self.evaluates:
            self.callbacks.evaluated(self, found)
        return found

    def set_learning_rate(self, step: int) -> float:
        """The schedule's rate for a step, set in every group; returns the first group's."""
        return self.rates.set(self.schedule, step, self.callbacks.rate_factor())

    def take_turn(self, step: int) -> str:
        """Whose turn a step is, and nobody else's weights get gradients."""
        return self.turns.take(step, self._in_turn)

    def _place(self, batch: dict[str, Any]) -> Batch:
        """A batch on this rank's device; wide floats only where the proof needs them."""
        wide = self.dtypes.compute == torch.float64

        def place(value: Tensor) -> Tensor:
            if value.is_floating_point():
                value = value.double() if wide else value.float() if value.dtype == torch.float64 else value
            return remember(value.to(self.device, non_blocking=True), value)

        return Batch({name: mapped(place, value) for name, value in batch.items()})

    def whole_gradients(self, divisor: float, without: set[str]) -> dict[str, Tensor | None]:
        """All summed gradients, whole and divided; None where no rank has one. All ranks must call it."""
        return {name: None if name in without else g / divisor for name, g in self.spread.whole.gradients()}

    def whole_weights(self, callback: Callback | None = None) -> dict[str, Tensor]:
        """Weights and buffers, whole, under the model's own names; of sites, those that all have agreed on.

        ``callback``: with what that callback keeps in the place of weights, such as the average of a `phalanx.EMA`. All
        ranks must call it.
        """
        if callback is not None:
            return dict(self.spread.whole.state(callback.tensors()))
        return dict(self.spread.whole.state(None if self.sites is None else self.sites.outer.agreed))

    def close(self) -> None:
        """Take the process groups apart."""
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
