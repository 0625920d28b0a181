"""What rank 0 says of an engine: how its task is spread, what each rank holds, and what its first steps find out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from phalanx import schedules
from phalanx.anatomy import Anatomy
from phalanx.callbacks import KeepBest
from phalanx.cluster import devices
from phalanx.data.by_length import LengthOrder
from phalanx.inventory import numbers
from phalanx.kernels.fp8 import MULTIPLE
from phalanx.layout_notes import layout_notes
from phalanx.parallel.communication.mesh import SHARD
from phalanx.task import Task
from phalanx.train.engine import Engine
from phalanx.train.memory import fullest
from phalanx.train.optimizers import parts_of
from phalanx.train.step import Metrics
from phalanx.words import in_bytes, listed, many

CLIPPED_STEPS = 20
"""If so many steps at the beginning are all clipped, that is said."""
MANY_ROWS = 64
"""So many rows for a sample of a batch make an embedding one of which a step reads little."""
SHOWN = 4
"""So many patterns of weights are told; of the others, how many they are."""


def split_notes(anatomy: Anatomy) -> list[str]:
    """Rules of the task's about how to split weights that have no effect."""
    idle = anatomy.idle_splits if anatomy.sources.get("splits") == "task" else {}
    if not idle:
        return []
    named = listed([f"{name} ({way})" for name, way in idle.items()], SHOWN)
    return [
        f"splits of Task.anatomy have no effect for {named}: tp cuts columns and rows inside of a block that has both, "
        "and vocabularies beside such blocks; fsdp shards all weights in any case"
    ]


class Overview:
    """Facts by name, notes, and news."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._gathered = 0
        self._twice = False
        self._steps, self._clipped = 0, 0

    def facts(self) -> dict[str, str]:
        """A line each, before the first step."""
        engine = self.engine
        world = engine.environment.world
        micro = many(engine.loader.micro_batches, "micro-batch", "micro-batches")
        return {
            "layout": f"{engine.layout} on {many(world, 'rank')}, {devices(engine.device.type, world)}",
            "model": f"{self._weights()}, {engine.anatomy.describe()}",
            **self._here(),
            "memory": str(fullest(engine.spread.placement, engine.kept, engine.dtypes)),
            "batch": f"{self._batch()} as {micro} a step, {engine.order.describe()}",
            **self._of_task[0],
            "optimizer": f"{self._optimizer()}; {self._clipping()}; {self._schedule()}",
            **kept_best(engine.callbacks.keeps_best),
            "dtypes": engine.dtypes.table(),
        }

    @cached_property
    def _of_task(self) -> tuple[dict[str, str], list[str]]:
        return self.engine.task.overview()

    def notes(self) -> list[str]:
        """Settings that have no effect, or cost more than they need."""
        device = self.engine.device.type
        stream = self.engine.dtypes.compute.itemsize
        mesh, micro_batches = self.engine.mesh, self.engine.loader.micro_batches
        hosts, shards = ([mesh.hosts[r] for r in mesh.members(axes)] if mesh.hosts else [] for axes in (("dp",), SHARD))
        settings = layout_notes(self.engine.layout, device, micro_batches, stream, hosts, shards)
        if not hosts:
            settings.append(
                "ranks were told in different ways which of them share a host, so none sum inside of hosts first: set "
                "LOCAL_WORLD_SIZE to the same on each"
            )
        if mesh.connections > 1:
            settings.append(
                f"a round trip to other hosts takes {1e3 * mesh.round_trip:.0f} ms, so what is large goes to each of "
                f"their ranks over {mesh.connections} connections at once"
            )
        given = getattr(self.engine.loader.reader.data, "notes", ())
        settings += split_notes(self.engine.anatomy)
        own = [*self._wide(), *self._dense(), *self._reordered(), *self._tables(), *self.news()]
        return [*settings, *given, *self._of_task[1], *self.engine.dtypes.notes(device), *own]

    def _dense(self) -> Iterator[str]:
        """Embeddings whose gradients are not sparse although they ask for it."""
        names = [name for name, module in self.engine.model.named_modules() if getattr(module, "sparse", False) is True]
        if names:
            yield f"sparse=True of {listed(names, SHOWN)} has no effect: gradients are dense, and every row is updated"

    def _reordered(self) -> Iterator[str]:
        """Weights in channels_last, which are kept contiguous, and a seed that has no effect."""
        if self.engine.reseeded is not None:
            yield (
                f"torch.manual_seed({self.engine.reseeded}) of the constructor has no effect: weights are drawn by the "
                f"task's seed={self.engine.task.seed}. What must be as elsewhere: draw it with a torch.Generator"
            )
        if names := self.engine.reordered:
            yield (
                f"channels_last of {listed(names, SHOWN)} has no effect: weights are kept contiguous. Convert "
                "images in inputs(), x.to(memory_format=torch.channels_last): layers compute in their input's format"
            )

    def _wide(self) -> Iterator[str]:
        """What of a model in 8 bits is not."""
        fp8, layout = self.engine.spread.fp8, self.engine.layout
        if fp8 is None:
            return
        if fp8.wide:
            (name, shape), *others = fp8.wide.items()
            more = f", and {many(len(others), 'linear')} more" if others else ""
            yield f"in bfloat16, since sizes are no multiples of {MULTIPLE}: {name} {list(shape)}{more}"
        if layout.compile == "none" and self.engine.device.type == "cuda":
            yield "8 bits gain little without compile=blocks: every cast is a pass over memory of its own"

    def news(self) -> Iterator[str]:
        """What was not known when this was asked before."""
        reasons = [c.gathered for c in self.engine.spread.plan.containers.values() if c.gathered]
        if len(reasons) > self._gathered:
            self._gathered = len(reasons)
            more = f", and {len(reasons) - 1} more like it" if len(reasons) > 1 else ""
            narrow = self.engine.spread.narrow.narrows(self.engine.dtypes.compute)
            sent = ", and send it as it is," if narrow else ""
            yield f"ranks of tp compute all of it alike{sent} where {reasons[-1]}{more}"
        if self.engine.spread.samples.all_at_once and not self._twice:
            self._twice = True
            yield "the loss needs all micro-batches of a step at once: each goes through the model twice"

    def _tables(self) -> Iterator[str]:
        """Embeddings that ZeRO 3 gathers whole in every forward, of which a step reads little."""
        weights, batch = self.engine.spread.placement.weights, self.engine.task.global_batch
        for name, module in self.engine.model.named_modules():
            rows, placed = getattr(module, "num_embeddings", 0), weights.get(f"{name}.weight")
            if placed is None or placed.policy.always_whole or rows < MANY_ROWS * batch:
                continue
            size = in_bytes(placed.shape.numel() * placed.policy.compute.itemsize)
            yield (
                f"fsdp gathers {name}.weight whole in every forward ({size}), and a step of {batch:,} samples reads "
                f"few of its {rows:,} rows: dp holds as much of it at a time, and sends no weights"
            )

    def stepped(self, metrics: Metrics) -> Iterator[str]:
        """What the first steps tell that is not as it should be."""
        self._steps += 1
        self._clipped += metrics.clip_factor < 1 and not metrics.skipped
        if self._steps == CLIPPED_STEPS == self._clipped:
            yield (
                f"each of the first {CLIPPED_STEPS} steps was clipped (clip={self.engine.task.clip:g}; the norm of the "
                f"last gradient was {metrics.grad_norm:.3g}). Set clip higher, or clip=inf, if that is not meant"
            )

    def _optimizer(self) -> str:
        """Which optimizers, at which rates and decays, and which weights have settings of their own."""
        found = []
        for part in parts_of(self.engine.optimizer):
            groups = [group for group in part.param_groups if group["params"]]
            decays = any(group.get("weight_decay") for group in groups)
            each = [f"{group['initial_lr']:g}{_decay(group, decays)}" for group in groups]
            if each:
                found.append(f"{type(part).__name__} at {' and '.join(dict.fromkeys(each))}")
        named = list(self.engine.task.parameters)
        own = f"; settings of their own: {listed(named, SHOWN)}" if named else ""
        return f"{', '.join(found) or 'none'}{own}"

    def _schedule(self) -> str:
        task = self.engine.task
        if type(task).schedule is not Task.schedule:
            return f"a schedule of its own over {many(task.steps, 'step')}"
        if task.warmup_steps >= task.steps > 0:
            return f"{many(task.steps, 'step')} of warm-up, which takes {task.warmup_steps}. Set warmup_steps to fewer"
        name, options = schedules.parsed(task.rate)
        end = f" down to {options['end']:.4g} of the rate" if "end" in options and name != "plateau" else ""
        return f"{name}{end} over {many(task.steps, 'step')}, {task.warmup_steps} of them warm-up"

    def _clipping(self) -> str:
        limit = self.engine.task.clip
        return "not clipped" if math.isinf(limit) else f"gradients clipped to a norm of {limit:g}"

    def _batch(self) -> str:
        """What a step has: so many samples, or tokens."""
        order, ranks = self.engine.order, self.engine.layout.batch_ranks
        if not isinstance(order, LengthOrder) or not order.batch_tokens:
            return many(self.engine.task.global_batch, "sample")
        samples = order.batch_tokens / max(1.0, float(order.lengths.mean()))
        few = f" (about {samples:.1f} samples for {ranks} ranks: set batch_tokens to more)" if samples < ranks else ""
        return f"up to {many(order.batch_tokens, 'token')} over all ranks{few}"

    def _weights(self) -> str:
        spread, trainable = self.engine.spread, self.engine.spread.trainable
        counts = {name: spread.holding.shapes[name].numel() for name in trainable} | numbers(spread.model)
        weights = sum(counts[name] for name in trainable)
        learned = sum(counts[name] for name, trained in trainable.items() if trained)
        frozen = f", {learned:,} of them trainable" if learned < weights else ""
        return f"{many(weights, 'weight')}{frozen}"

    def _here(self) -> dict[str, str]:
        """What this rank has of the model, where ranks have parts."""
        spread, layout = self.engine.spread, self.engine.layout
        if layout.fsdp * layout.tp * layout.cp * layout.pp == 1:
            return {}
        own = sum(weight.shard.numel() for weight in spread.weights.values() if weight.trainable)
        text = f"{own:,} of them updated by rank 0"
        if spread.pipeline is not None:
            stages = " | ".join(f"{blocks[0]} to {blocks[-1]}" for blocks in spread.pipeline.stages.blocks)
            text += f"; stages: {stages}"
        return {"here": text}


def kept_best(watcher: KeepBest | None) -> dict[str, str]:
    """Which checkpoint is kept as the best, in a line, if one is."""
    if watcher is None:
        return {}
    most = "lowest" if watcher.mode == "min" else "highest"
    return {"best": f"the checkpoint with the {most} {watcher.measure} is kept, and its weights are left at the end"}


def _decay(group: Mapping[str, Any], others: bool) -> str:
    without = " without decay" if others else ""
    return f" with decay {group['weight_decay']:g}" if group.get("weight_decay") else without
