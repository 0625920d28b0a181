"""What rank 0 says of an engine: how its task is spread, what each rank holds, and what its first steps find out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

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
from phalanx.words import listed, many

SHOWN = 4
"""So many patterns of weights are told; of the others, how many they are."""


class Overview:
    """Facts by name, notes, and news."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._gathered = 0
        self._twice = False

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
            "batch": f"{self._batch()} as {micro} a step, {many(engine.order.size, 'sample')} an epoch",
            **self._of_task[0],
            "optimizer": f"{self._optimizer()}; {self._schedule()}",
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
        return [*settings, *given, *self._of_task[1], *self.engine.dtypes.notes(device), *self._wide(), *self.news()]

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

    def _optimizer(self) -> str:
        """Which optimizers, at which rates and decays, and which weights have settings of their own."""
        found = []
        for part in parts_of(self.engine.optimizer):
            each = [f"{group['initial_lr']:g}{_decay(group)}" for group in part.param_groups if group["params"]]
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
        return f"{task.rate} over {many(task.steps, 'step')}, {task.warmup_steps} of them warm-up"

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


def _decay(group: Mapping[str, Any]) -> str:
    return f" with decay {group['weight_decay']:g}" if group.get("weight_decay") else ""
