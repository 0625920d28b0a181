"""A task of which nothing can be proven, since it fails on one device: told as `phalanx train` would tell it."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from phalanx.errors import CannotHere, WrongUse
from phalanx.launch import blame
from phalanx.layout import Layout
from phalanx.prove.own_faults import described, is_own
from phalanx.task import Task
from phalanx.torch_errors import About, matches
from phalanx.traces import folded
from phalanx.train.check import lines
from phalanx.train.engine import Engine
from phalanx.train.shrink import Needs, shrunk

if TYPE_CHECKING:
    from phalanx.prove.ladder import Standard

MOST_BAR = 1e-9
"""So much a bug might be off by without being seen; more is no proof."""


class Unprovable(Exception):
    """A task of which nothing can be proven: why, and what to do."""

    def __init__(self, summary: str, next: str, code: int | None = None, evidence: Sequence[str] = ()) -> None:
        """``code``: an exit code other than that of a finding."""
        super().__init__(summary)
        self.summary, self.next, self.code, self.evidence = summary, next, code, list(evidence)


def failed(task: Task, needs: Needs, error: Exception) -> Unprovable:
    """What to say of an error of the proof's own run on one device: what training it there would, if it fails too."""
    plainly = _trained(task, needs)
    if isinstance(plainly, (WrongUse, CannotHere)):
        raise plainly
    told = plainly or error
    summary = f"{type(task).__name__} fails on one device: {blame.reason(told)}{lines.at(lines.of_error(told))}"
    evidence = [text for text in [folded(told)] if text]
    if plainly is not None:
        return Unprovable(summary, "Mend that first; phalanx train says the same.", code=2, evidence=evidence)
    if isinstance(error, RuntimeError) and matches(error, About.DTYPES) > 1:
        return Unprovable(
            f"{summary}. It computes in float64 while it is proven, and meets a narrower number there",
            "Make constants as wide as what they meet: torch.tensor(..., dtype=output.dtype), or register_buffer.",
            code=2, evidence=evidence,
        )  # fmt: skip
    trace = "".join(traceback.format_exception(error))
    if is_own(trace):
        own, last, advice = described("the run on one device", trace)
        return Unprovable(own, advice, code=3, evidence=last)
    return Unprovable(
        f"{summary}. As it is, without what a proof does to a task, it trains",
        "Look at what that line takes for granted: a proof has other batches, float64, shorter epochs and ignored "
        "targets. If it cannot do without, give the task a tiny() of its own.",
        code=2, evidence=evidence,
    )  # fmt: skip


def _trained(task: Task, needs: Needs) -> Exception | None:
    """What a step on one device raises, and what measuring does, without anything that a proof adds; None: nothing."""
    try:
        small = copy.copy(shrunk(task, needs).task)
        object.__setattr__(small, "workers", 0)
        with Engine(small, Layout(), device="cpu") as engine:
            batch = next(engine.batches(), None)
            if batch is not None:
                engine.step(batch)
            if engine.held_out is not None:
                engine.evaluate(batches=1)
    except Exception as error:
        return error
    return None


def check_certifies(task: Task, standard: Standard) -> None:
    """Refuse a task whose rounding could hide a bug."""
    if not standard.certifies:
        raise Unprovable(
            f"cannot certify: one rounding at the beginning becomes {standard.sensitivity:.1e} in "
            f"{type(task).__name__} on one device, and a bug of up to {standard.bar:.1e} could hide in that; the "
            f"bar must be {MOST_BAR:.0e} or less",
            "Something computes in a lower precision, or divides by next to nothing: keep to the dtype of the "
            "inputs in the model's forward (no .float()), and look for logs and roots near 0.",
            code=3,
        )


def check_apart(task: Task, layout: Layout, chunked: bool) -> None:
    """Of a task that computes samples of several ranks together: refuse a layout that rounds what each rank has.

    ``chunked``: it does so by chunks of sequences.
    """
    if layout.coded_axis or layout.local:
        raise Unprovable(
            f"comm={layout.comm} rounds what each rank has of a gradient, or has sites train on their own samples, "
            f"and in {type(task).__name__} samples of several ranks are computed together, so that no device alone "
            "has it",
            "Prove the layout without comm.",
        )
    if chunked:
        raise Unprovable(
            f"activations={layout.activations} rounds what each rank of cp={layout.cp} has of a key's gradient, by how "
            f"long its own samples are, and in {type(task).__name__} samples of several ranks are computed together",
            "Prove the layout with cp_kind=ulysses, or without activations.",
        )
