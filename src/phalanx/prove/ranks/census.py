"""A census of collectives: what a layout must send along each axis in a step, against what was sent.

For gradients and weights the bytes follow from the layout and the shapes, exactly. For activations they depend on the
batch: there it is known which kinds of message an axis cannot do without.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterator

from phalanx.parallel.axes import batchnorm
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.mesh import BATCH, EXPERTS
from phalanx.parallel.weights.bucket import Bucket
from phalanx.parallel.weights.matrices import COPY
from phalanx.train.engine import Engine
from phalanx.train.step_agreement import AGREED

Bounds = dict[tuple[str, str], tuple[float, float]]
"""By axis and kind, the fewest and the most bytes of a step."""
SOME = (0, math.inf)


def expected(engine: Engine, micro_batches: int, called: Container[str]) -> Bounds:
    """What the algebra of the layout says that this rank sends in a step.

    ``called``: the modules that one device has called in it, of those whose work takes messages.
    """
    found: Bounds = {}
    mesh, spread = engine.spread.mesh, engine.spread
    trained = [bucket for bucket in spread.buckets if bucket.trainable]
    dp = mesh.group("dp")
    again = spread.samples.all_at_once  # a step was begun before that was known
    if not dp.alone:
        sums = sum(round(_as_it_is(b, "dp") * _wide(b) * _both_ways(dp)) for b in trained)
        for kind, coded in sum((b.coded.sent(dp.size) for b in trained if b.coded is not None), Counter()).items():
            sums += coded if kind == "all-reduce" else 0
            found["dp", kind] = coded, math.inf if kind == "all-gather" else coded
        exact = sums + (_agreed(engine, dp) if mesh.world is dp else 0)
        also = exact if mesh.group(*BATCH) is not dp and not again else math.inf  # batch-norm may add to it
        if exact:
            found["dp", "all-reduce"] = exact, also if mesh.world is not dp else math.inf
    for group in {id(b.storage.group): b.storage.group for b in trained if not b.storage.group.alone}.values():
        own = [b for b in trained if b.storage.group is group]
        parts = sum(_as_it_is(b, "fsdp") * _wide(b) * (group.size - 1) for b in own)
        coded = sum(_coded(b, "fsdp") * (group.size - 1) for b in own)
        times = 1 if own[0].storage.whole_gradients else micro_batches
        shared = group is mesh.group(*BATCH) and spread.samples.used  # with what a loss gathers
        most = parts * times if spread.pipeline is None and not shared and not again else math.inf
        if parts:
            found[group.name, "reduce-scatter"] = (parts if spread.pipeline else parts * times), most
        if coded:
            found[group.name, "all-to-all"] = coded if spread.pipeline else coded * times, math.inf
        found[group.name, "all-gather"] = SOME
    found |= _activations(engine, called) | _matrices(engine)
    if not mesh.world.alone and (mesh.world.name, "all-reduce") not in found:
        found[mesh.world.name, "all-reduce"] = _agreed(engine, mesh.world), math.inf
    return {key: bounds for key, bounds in found.items() if bounds[1] > 0}


def _as_it_is(bucket: Bucket, axis: str) -> int:
    """Numbers of a row of gradients that travel over an axis as they are."""
    coded, length = bucket.coded, bucket.gradient_packing.length
    few = coded is not None and coded.axis == axis and coded.active and not coded.method.plain
    return length - (coded.length if few and coded is not None else 0)


def _coded(bucket: Bucket, axis: str) -> int:
    """Bytes of a row of gradients that is encoded for an axis."""
    if bucket.coded is None or bucket.coded.axis != axis or bucket.coded.method.plain:
        return 0
    return bucket.coded.codec.size(bucket.coded.length, bucket.storage.reduce)


def _agreed(engine: Engine, world: Communicator) -> int:
    """What all ranks agree on: loss, count, norm, missing and trained weights, signals; or a norm's squares."""
    return round((16 if engine.layout.exact else 8 * AGREED) * _both_ways(world))


def _activations(engine: Engine, called: Container[str]) -> Bounds:
    mesh, spread = engine.spread.mesh, engine.spread
    found: Bounds = {}
    travels = spread.placement.travels(mesh, called)
    found |= {(axis, kind): SOME for axis in ("tp", "cp") for kind in travels.get(axis, ())}
    if "tp" in travels and spread.narrow.narrows(engine.dtypes.compute):
        containers = spread.plan.containers.items()
        ways = {bool(own.gathered) for name, own in containers if spread.placement.has(mesh, name)}
        if True not in ways:
            found = {key: SOME for key in found if key not in (("tp", "reduce-scatter"), ("tp", "all-reduce"))}
        if False in ways:  # terms of sums in few bits are exchanged
            found |= {("tp", "all-gather"): SOME, ("tp", "all-to-all"): SOME}
    if spread.pipeline is not None:
        stages, rank = spread.pipeline.stages, mesh.index("pp")
        own = stages.of(rank)
        found |= {("pp forward", "send"): SOME} if min(own) < stages.last else {}
        found |= {("pp backward", "send"): SOME} if max(own) > 0 else {}
        found |= {("pp", "all-to-all"): SOME} if "all-to-all" in travels["pp"] else {}
    experts = mesh.group(*EXPERTS)
    if not experts.alone and "ep" in travels:
        found[experts.name, "all-to-all"] = SOME
    norms = [name for name, module in spread.model.named_modules() if isinstance(module, batchnorm.KINDS)]
    batch = mesh.group(*BATCH)
    if not batch.alone and any(name in called and spread.holding.here(name) for name in norms):
        found[batch.name, "all-gather"] = SOME
    return found


def _matrices(engine: Engine) -> Bounds:
    """Whole matrices on their way to whoever updates them, and back."""
    if all(weight.optimized is weight.shard for weight in engine.spread.weights.values()):
        return {}
    group = engine.spread.mesh.joint(*COPY)
    return {} if group.alone else {(group.name, "all-to-all"): SOME}


def _wide(bucket: Bucket) -> int:
    return bucket.storage.reduce.itemsize


def _both_ways(group: Communicator) -> float:
    return 2 * (group.size - 1) / group.size


def crossing(
    engine: Engine, calls: Counter[tuple[str, str]], sent: Counter[tuple[str, str]]
) -> Iterator[tuple[str, str, str]]:
    """The same of what sites that train by themselves say to each other: nothing, but where they agree."""
    local, outer, step = engine.layout.local, engine.spread.outer, engine.step_number
    if local is None or outer is None or step == engine.task.steps:
        return
    names = {engine.mesh.group("dp").name, engine.mesh.world.name} - {engine.spread.mesh.world.name}
    said = {key for key in calls if key[0] in names}
    moves = [local.arriving(step), local.leaving(step), local.arriving(step + local.overlap // 2)]
    if said and all(number is None for number in moves):
        axis, kind = min(said)
        yield axis, kind, f"{sent[axis, kind]:,} bytes of {kind} over {axis}, where sites train by themselves"
    leaving = local.leaving(step)
    if leaving is not None and not local.overlap:
        fragment = outer.fragments[leaving]
        most = fragment.length * fragment.dtype.itemsize * _both_ways(outer.sites)
        if fragment.codec is not None:
            most = sum(fragment.codec.sent(fragment.length, fragment.dtype, outer.sites.size).values())
        found = sum(count for (axis, _), count in sent.items() if axis == outer.sites.name)
        agreed = engine.mesh.world.name == outer.sites.name and engine.just_agreed
        if found < round(most) or (not agreed and found > round(most)):
            yield (
                outer.sites.name,
                "",
                f"{found:,} bytes over {outer.sites.name}, where an outer step needs {most:,.0f}",
            )


def amiss(
    calls: Counter[tuple[str, str]], sent: Counter[tuple[str, str]], bounds: Bounds
) -> Iterator[tuple[str, str, str]]:
    """Axis, kind and what is wrong, for each kind of message that was not sent as it must be."""
    for (axis, kind), (least, most) in bounds.items():
        found = sent[axis, kind]
        if not calls[axis, kind]:
            yield axis, kind, f"no {kind} over {axis} was seen, where the layout needs one"
        elif found < least:
            yield axis, kind, f"{found:,} bytes of {kind} over {axis}, where the layout needs {least:,.0f}"
        elif found > most:
            yield axis, kind, f"{found:,} bytes of {kind} over {axis}, where the layout needs no more than {most:,.0f}"
