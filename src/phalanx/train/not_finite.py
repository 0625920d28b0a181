"""Where a number that is not finite came from: after a bad step, its forward again, module by module.

All ranks come here after the same step. Nothing that training depends on is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from phalanx.data.loader import StepBatch
from phalanx.logits import Logits
from phalanx.parallel.communication.mesh import AXES
from phalanx.train.guard import first_not_finite
from phalanx.train.step import compute, copies, put_back
from phalanx.trees import leaves
from phalanx.words import ranks_named

if TYPE_CHECKING:
    from phalanx.train.engine import Engine

TIMES = 3
"""So many bad steps of a generation are looked into."""
SHOWN = 8


def located(engine: Engine, batch: StepBatch) -> dict[str, Any]:
    """For the event of a bad step: ``where`` in words, the ``module``, the ``rank`` if it is one, and what was found.

    All ranks must call it.
    """
    own_loss = bool(engine.logged.loss[:, 0].isfinite().all())
    weights = engine.spread.weights.items()
    weight = first_not_finite((name, each.shard.data) for name, each in weights if each.trainable)
    gradients = [] if weight else _gradients(engine)
    module, words = _module(engine, batch)
    world, ranks = engine.spread.mesh.world, engine.spread.mesh.members(AXES)
    said = world.all_gather_words(["" if own_loss else "loss", weight, module, words, *gradients])
    told = dict(zip(ranks, said, strict=True))
    with_weight = [rank for rank in ranks if told[rank][1]]
    with_module = [rank for rank in ranks if told[rank][2]]
    with_loss = [rank for rank in ranks if told[rank][0]]
    if with_weight:
        name = told[with_weight[0]][1]
        return _event(f"the weight {name} of {ranks_named(with_weight)} was not finite before", name, with_weight)
    if with_module:
        first = told[with_module[0]]
        found = [f"on rank {rank} {told[rank][3]}" for rank in with_module[:SHOWN]]
        return _event(f"{first[3]}, on {ranks_named(with_module)}", first[2], with_module, found)
    if with_loss:
        words = (
            f"the loss of {ranks_named(with_loss)}, while all that the model gives is finite when it is computed again"
        )
        return _event(words, "", with_loss)
    names = list(dict.fromkeys(name for words in told.values() for name in words[4:]))
    if not names:
        return {}
    order = [name for name in engine.spread.trainable if name in names]
    return _event(
        f"the gradient of {order[-1]}" + (f" and of {len(order) - 1} weights before it" if order[1:] else "")
        + ": it came up in backward", order[-1], [],
    )  # fmt: skip


def _event(where: str, module: str, ranks: list[int], found: list[str] | None = None) -> dict[str, Any]:
    return {"where": where, "module": module, "rank": ranks[0] if len(ranks) == 1 else None, "found": found or []}


def _gradients(engine: Engine) -> list[str]:
    """Weights whose gradients are not finite on this rank, as far as they are still there."""
    return [weight.name for weight, own in engine.spread.gradients.each() if not _finite(own)]


@torch.no_grad()
def _module(engine: Engine, batch: StepBatch) -> tuple[str, str]:
    """The first module of this rank that makes numbers that are not finite of some that are, and that in words."""
    spread, before = engine.spread, copies(engine.spread.model)
    found: list[tuple[str, str]] = []

    def look(output: Any, tensors: dict[str, Any]) -> None:
        values = output.hidden if isinstance(output, Logits) else output
        if not found and not _finite(values):
            found.append(("the model", "the model's output is not finite, and what its modules give is"))

    actions = spread.forwards(len(batch.micro_batches))
    spread.start(batch.micro_batches, actions)
    with _watched(spread.model, found):
        for action in actions:
            compute(engine, batch.step, batch.micro_batches[action.micro], action, look)
    spread.rest()
    put_back(before)
    if spread.fp8 is not None:
        spread.fp8.forget()
    return found[0] if found else ("", "")


@contextmanager
def _watched(model: nn.Module, found: list[tuple[str, str]]) -> Iterator[None]:
    """Meanwhile the first of its modules that does so is noted."""
    parents: list[str] = []
    handles = []

    def watch(name: str, module: nn.Module) -> None:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not name:  # a stage that ends leaves no module
                parents.clear()
            if not found and not _finite([args, kwargs]):
                parent = parents[-1] if parents else ""
                given = f"what {name or 'the model'} is given is not finite"
                found.append(("", "") if not parent else (parent, f"{parent} makes it between its modules: {given}"))
            parents.append(name)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            parents.pop()
            if not found and not _finite(output):
                named = name or "the model"
                found.append((named, f"{named} gives numbers that are not finite, from some that are"))

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after))

    for name, module in model.named_modules():
        watch(name, module)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _finite(values: Any) -> bool:
    return all(bool(each.isfinite().all()) for each in leaves(values, Tensor) if each.is_floating_point())
