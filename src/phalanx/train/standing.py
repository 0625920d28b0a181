"""Where a run stands, beside its tensors: with both it can go on under any layout.

Samples and draws follow from the seed and the step, so that no generator has a state to be kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from phalanx.train.calling import Ended
from phalanx.train.changes import allowed_changes

if TYPE_CHECKING:
    from phalanx.train.engine import Engine


def facts_of(engine: Engine) -> dict[str, Any]:
    """The same on every rank, but for what stages know of their own weights."""
    task, anatomy = engine.task, engine.anatomy
    return {
        "step": engine.step_number, "samples": engine.samples, "terms": engine.terms,
        "scale": engine.loss_scale.state(), "guard": engine.guard.state(), "compared": engine.compared,
        "good": engine.good, "fp8": engine.spread.scales(), "seed": task.seed, "global_batch": task.global_batch,
        "data": engine.order.size, "streams": ["order", "sample", "task", *anatomy.blocks],
        "task": type(task).__name__, "layout": str(engine.layout), "world": engine.environment.world,
        "precision": task.precision, **engine.described, "versions": engine.versions, "tied": dict(anatomy.tied),
        **engine.numbers.facts(), "callbacks": engine.callbacks.state(), "ended": engine.ended and asdict(engine.ended),
        "comm": engine.auto_comm.state(),
        "outer": engine.sites and [engine.sites.outer.rate, engine.sites.outer.momentum],
    }  # fmt: skip


def resume(engine: Engine, facts: Mapping[str, Any]) -> None:
    """Go on from where a run stood; its tensors are in place."""
    found = allowed_changes(engine, facts, engine.allow_changes)
    engine.changes, engine.other_samples = [change.words for change in found], any(change.order for change in found)
    engine.step_number, engine.samples, engine.terms = facts["step"], facts["samples"], facts["terms"]
    engine.loss_scale.restore(facts["scale"])
    engine.guard.restore(facts["guard"])
    engine.compared, engine.good = facts["compared"], facts.get("good")
    engine.numbers.restore(facts)
    engine.callbacks.restore(facts.get("callbacks", {}))
    engine.signals.finish, engine.why = False, ""
    engine.ended = Ended.found(facts, engine.task.steps)
    engine.spread.restore_scales(facts.get("fp8"))
    engine.auto_comm.restore(facts.get("comm", {}))
    engine.graphs.forget()
    engine.spread.reduction.settle()
    if engine.sites is not None:
        engine.sites.settle()
    engine.spread.updated()
