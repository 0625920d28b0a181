"""Whether the loss of a batch is the sum of its samples': then it does not matter which of them are together.

A batch is computed whole and in two parts of uneven size, in float64. Where those do not add up, what mixes samples is
looked for from the front: the collated batch, the inputs, each module, the loss's total, its count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx import gathering
from phalanx.data.kinds import check_rows
from phalanx.data.seeding import seed_globally
from phalanx.errors import WrongUse
from phalanx.logits import Logits
from phalanx.losses import Loss
from phalanx.parallel.axes.samples import SAME_NAMES
from phalanx.parallel.randomness.answers import generator_state
from phalanx.task import Task, as_loss
from phalanx.train.check import lines
from phalanx.train.check.learning import named, place
from phalanx.train.check.misuse import DropoutLeftOn
from phalanx.train.check.parts import differ, longer, paired, rows_of
from phalanx.train.check.quotients import quotient
from phalanx.train.check.subject import ModuleCall, RefusedAnyway, Subject, moved, overrides, unless_said
from phalanx.train.collecting import Collected
from phalanx.train.evaluate import checked

WIDE_TOLERANCE, NARROW_TOLERANCE = 1e-5, 1e-2
"""Relative: in float64, where a model may round some to float32, and where a task computes in float32 alone."""


SUM = "Sum over samples and divide nowhere yourself"
TOGETHER = "depends on which samples are computed together"
DIVIDED = "so no layout that divides a batch can train like one device"


def check_sums(subject: Subject) -> list[str]:
    """Refuse a loss that depends on which samples are together; returns what is only likely to be a mistake."""
    pair = _pair(subject)
    if pair is None:
        return []
    with torch.no_grad():
        warnings = _check_collate(subject, pair)
        if warnings:
            return warnings  # what is in a batch differs already
        asked = _asked()
        whole = subject.compute(subject.places)
        if _asked() != asked:
            return []
        parts = [subject.compute(part) for part in pair]
        for name, loss, others in _losses(whole.loss, [part.loss for part in parts]):
            if (what := _differ(subject, loss, others)) is not None:
                raise _mixes(subject, pair, what, f"loss{f' ({name})' if name else ''}", evaluate=False)
    return []


def check_evaluate(subject: Subject) -> list[str]:
    """Likewise what is measured of held-out samples: sums and counts, and what is gathered by rows."""
    pair, dropout = _pair(subject), DropoutLeftOn()
    training = {module: module.training for module in subject.model.modules()}
    subject.model.eval()
    try:
        with torch.no_grad():
            if pair is not None and (warnings := _check_collate(subject, pair)):
                return warnings
            asked = _asked()
            whole = _measured(subject, dropout)
            if _asked() == asked and pair is not None:  # else it needs all samples, and has them
                _check_measures(subject, pair, whole)
    finally:
        for module, before in training.items():
            module.training = before
    return dropout.found


def _measured(subject: Subject, under: DropoutLeftOn) -> Mapping[str, Any]:
    """What the task measures; a value that is no measure is refused, as in training, with the line."""
    with lines.returns(type(subject.task).evaluate) as returned:
        value = subject.compute(subject.places, evaluate=True, under=under).value
    try:
        rows = Collected(subject.task)
        for name, measure in checked(subject.task, value).items():
            if isinstance(measure, (Tensor, list)):
                rows.add(name, measure, np.array(subject.places), real=True)
            elif not isinstance(measure, Logits):
                as_loss(measure, subject.task, f"evaluate, for {name!r},")
        if rows.columns and not overrides(subject.task, "summarise", Task):
            subject.task.summarise(dict(rows.columns))  # which says what is missing
    except WrongUse as refusal:
        raise RefusedAnyway(f"{refusal}{unless_said(returned(), str(refusal))}") from refusal
    return dict(value)


def _check_measures(subject: Subject, pair: tuple[range, range], whole: Mapping[str, Any]) -> None:
    parts = [subject.compute(part, evaluate=True) for part in pair]
    for name, value in whole.items():
        others = [part.value.get(name) for part in parts]
        rows = isinstance(value, Tensor) and value.is_floating_point()  # others may flip by rounding
        for places, other in zip(pair, others, strict=True) if rows else ():
            if _any_off(subject, value, other, places, len(subject.samples)):
                raise _mixes(subject, pair, None, f"evaluate's {name!r}", evaluate=True)
        sums = all(isinstance(item, Loss) for item in (value, *others))
        for part, loss, its in _losses(value, others) if sums else ():
            if (what := _differ(subject, loss, its)) is not None:
                of = f"evaluate's {name!r}{f' ({part})' if part else ''}"
                raise _mixes(subject, pair, what, of, evaluate=True)


def _asked() -> int:
    """How often samples of the whole global batch were asked for: a loss that does so need be no sum over samples."""
    return gathering.calls


def _pair(subject: Subject) -> tuple[range, range] | None:
    count = len(subject.samples)
    cut = 3 if count > 4 else 1  # odd, so that neighbours that belong together are torn apart
    return (range(cut), range(cut, count)) if count > 1 else None


def _losses(whole: Loss, parts: Sequence[Any]) -> Iterator[tuple[str, Loss, list[Any]]]:
    """A loss, or those by name that it is made of, with those of the parts."""
    for part in parts:
        if list(part.parts) != list(whole.parts):
            first, second = (", ".join(loss.parts) or "nothing" for loss in (whole, part))
            raise WrongUse(f"phalanx.losses.sum gets {first} for a batch and {second} for some of it. {SAME_NAMES}")
    for name, loss in whole.parts.items():
        yield name, loss, [part.parts[name] for part in parts]
    if not whole.parts:
        yield "", whole, list(parts)


@dataclass(frozen=True)
class Differ:
    """A sum and count of a batch, and those of its parts, where they do not add up."""

    total: float
    totals: list[float]
    count: float
    counts: list[float]
    which: str
    """total, or count."""

    @property
    def mean(self) -> bool:
        """Whether the total is a mean over samples rather than a sum."""
        low, high = min(self.totals), max(self.totals)
        return self.which == "total" and low <= self.total <= high

    @property
    def constant(self) -> bool:
        return self.count == self.counts[0] == self.counts[1]


def _differ(subject: Subject, loss: Loss, others: Sequence[Any]) -> Differ | None:
    totals, counts = ([float(_number(getattr(o, w))) for o in others] for w in ("total", "count"))
    total, count = float(_number(loss.total)), float(_number(loss.count))
    tolerance = WIDE_TOLERANCE if subject.dtype == torch.float64 else NARROW_TOLERANCE
    if abs(total - sum(totals)) > tolerance * (abs(total) + sum(map(abs, totals))):
        return Differ(total, totals, count, counts, "total")
    if abs(count - sum(counts)) > 1e-6 * (abs(count) + sum(map(abs, counts))):
        return Differ(total, totals, count, counts, "count")
    return None


def _number(value: Any) -> Tensor:
    return torch.as_tensor(0 if value is None else value).detach().double().sum()


def _check_collate(subject: Subject, pair: tuple[range, range]) -> list[str]:
    """A batch must hold its samples as they are alone, but for padding."""
    whole, seeded = subject.batch(subject.places), generator_state(torch.device("cpu"))
    try:
        check_rows(whole, subject.samples)
    except WrongUse as refusal:
        raise RefusedAnyway(f"{refusal}{lines.at(lines.of(type(subject.task).collate))}") from refusal
    seed_globally(subject.task.seed, "check collate")
    drew = moved(seeded)
    for part in pair:
        alone = subject.batch(part)
        for name, column in alone.items():
            for a, b in paired(whole.get(name), column, part, len(subject.samples)):
                if torch.equal(a.nan_to_num(), b.nan_to_num()) or _counted_on(a, b, part):
                    continue
                where = lines.at(lines.of(type(subject.task).collate))
                if drew:
                    return [
                        f"{subject.name}.collate draws at random{where}: what {name!r} is then depends on which "
                        "samples are together, and so on how the job is spread. Draw where a sample is read, in "
                        "data()[i], whose draws are its own."
                    ]
                raise WrongUse(
                    f"{subject.name}.collate mixes samples{where}: {name!r} of a sample is something else when others "
                    "are in its batch, so that the result would depend on how the job is spread. Compute it where a "
                    "sample is read, or from numbers that are known before."
                )
    return []


def _counted_on(whole: Tensor, alone: Tensor, part: range) -> bool:
    """Whether whole numbers are places in the batch, as of nodes or boxes: counted on from the samples before."""
    if not part.start or whole.numel() < 2 or whole.is_floating_point() or whole.dtype == torch.bool:
        return False
    low, high = (whole - alone).aminmax()
    return bool(low > 0) and bool(low == high)


def _mixes(subject: Subject, pair: tuple[range, range], what: Differ | None, of: str, evaluate: bool) -> WrongUse:
    """What to say of a task whose parts do not add up to the whole: the first thing that mixes."""
    whole = subject.compute(subject.places, evaluate=evaluate, watch=True)
    count = len(subject.samples)
    split = [(part, subject.compute(part, evaluate=evaluate, watch=True)) for part in pair]
    for part, given in split:
        if _any_off(subject, whole.inputs, given.inputs, part, count):
            where = lines.at(lines.of(type(subject.task).inputs))
            return WrongUse(
                f"{subject.name}.inputs mixes samples{where}: what a sample gives the model is something else when "
                "others are in its batch, so that the result would depend on how the job is spread. Compute it from "
                "each sample alone, in inputs() or where it is read."
            )
    for part, given in split:
        for together, alone in zip(whole.modules, given.modules, strict=False):
            if together.name == alone.name and _any_off(subject, together.output, alone.output, part, count):
                return _module(subject, pair, together, evaluate)
    if what is None:
        where = lines.at(_line_that_mixes(subject, pair, evaluate) or lines.of(type(subject.task).evaluate))
        return WrongUse(
            f"{subject.name}.{of} gives a sample something else when others are in its batch{where}, {DIVIDED}."
            f"{_padding(subject, pair)} Compute the row of each sample by itself."
        )
    return _total_or_count(subject, pair, what, of, evaluate)


def _any_off(subject: Subject, whole: Any, alone: Any, part: range, count: int) -> bool:
    return any(differ(a, b, subject.dtype) for a, b in paired(whole, alone, part, count))


def _module(subject: Subject, pair: tuple[range, range], ended: ModuleCall, evaluate: bool) -> WrongUse:
    line = _line_that_mixes(subject, pair, evaluate) or place(subject, ended.name)
    return WrongUse(
        f"the model of {subject.name} mixes {'held-out ' if evaluate else ''}samples: a sample gives something else "
        f"when others are in its batch, first in the output of {named(subject, ended.name)}{lines.at(line)}, {DIVIDED}."
        f"{_padding(subject, pair)} Compute each sample by itself, or with a norm over features; mask what pads a "
        "batch; draw with torch's functions, without a generator. "
        "Batch-norm is known and spread over ranks; other ways to look across the batch belong into the loss, with "
        "phalanx.gather(x)."
    )


def _padding(subject: Subject, pair: tuple[range, range]) -> str:
    """What `collate` pads to the longest sample of a batch, if anything."""
    whole = subject.batch(subject.places)
    for part in pair:
        for name, column in subject.batch(part).items():
            if (shapes := longer(whole.get(name), column)) is not None:
                return (
                    f" collate pads {name!r} to the longest of a batch, {list(shapes[0])} for all samples and "
                    f"{list(shapes[1])} for some: mask what is padded, or pad to one length."
                )
    return ""


def _total_or_count(subject: Subject, pair: tuple[range, range], what: Differ, of: str, evaluate: bool) -> WrongUse:
    method = type(subject.task).evaluate if evaluate else type(subject.task).loss
    with lines.returns(method) as returned:
        subject.compute(subject.places, evaluate=evaluate)
    asked = "of the held-out data" if evaluate else "of a step"
    last = lines.at(returned() or lines.of(method))
    name = f"{subject.name}.{of}"
    if divides := quotient(subject, pair, evaluate):
        return WrongUse(
            f"{name} divides by a sum over the batch of what the model predicts{lines.at(divides)}, as soft Dice, IoU "
            f"and Tversky losses do, {DIVIDED}. For the Dice of each sample, write phalanx.losses.dice(output, "
            'targets); for that of the whole global batch, phalanx.losses.dice(output, targets, over="batch"); for '
            "masks, binary_dice. For another quotient, sum over each sample: phalanx.gather(sums).sum(0) is over all."
        )
    if what.mean and what.constant:
        return WrongUse(
            f"{name} is a mean and a count of {what.count:g}{last}: the mean of such means is not the mean {asked}, "
            "and depends on how the job is spread. Return phalanx.Loss(sum over the samples, how many), e.g. with "
            "reduction='sum'."
        )
    if what.which == "count":
        told = f"{what.count:g} for {len(subject.samples)} samples, and {what.counts[0]:g} and {what.counts[1]:g}"
        return WrongUse(
            f"the count of {name} is not that of its terms{last}: it is {told} for two parts of them. Count what the "
            "total sums up, so that counts of parts add up to the count of the batch."
        )
    line = _line_that_mixes(subject, pair, evaluate)
    where = lines.at(line) or last
    if what.mean:
        return WrongUse(
            f"the total of {name} is a mean over the batch, not a sum{where}: {what.total:.6g} for the batch, "
            f"{what.totals[0]:.6g} and {what.totals[1]:.6g} for two parts of it. Sum over the samples, e.g. with "
            "reduction='sum', and leave the division by the count to the step."
        )
    if _once_a_batch(subject, what, evaluate):
        once = sum(what.totals) - what.total
        return WrongUse(
            f"{name} has a term that is the same however many samples there are{last}: {once:.6g}, once for a batch "
            f"and once for each part of it, {DIVIDED}. Multiply it with the count; a penalty on weights may be the "
            "optimizer's weight_decay instead."
        )
    return WrongUse(
        f"{name} {TOGETHER}{where}: its total is {what.total:.6g} for a batch, and {sum(what.totals):.6g} for two "
        f"parts of it together, {DIVIDED}.{_padding(subject, pair)} {SUM}. For a contrastive loss, or class weights of "
        "a batch, "
        "phalanx.gather(x) gives the rows of the whole global batch; constants belong into a field of the task."
    )


def _once_a_batch(subject: Subject, what: Differ, evaluate: bool) -> bool:
    """Whether parts have too much by one number for each of them."""
    every = [subject.compute([place], evaluate=evaluate).value for place in subject.places]
    if evaluate or not all(isinstance(loss, Loss) and not loss.parts for loss in every):
        return False
    once, more = sum(what.totals) - what.total, sum(float(_number(loss.total)) for loss in every) - what.total
    tolerance = WIDE_TOLERANCE if subject.dtype == torch.float64 else NARROW_TOLERANCE
    return abs(more - (len(every) - 1) * once) <= tolerance * abs(more)


def _line_that_mixes(subject: Subject, pair: tuple[range, range], evaluate: bool) -> str:
    """The first line of the user's where a torch function gives something of the batch that is not of its samples."""
    with lines.Calls() as whole:
        subject.compute(subject.places, evaluate=evaluate)
    with lines.Calls() as alone:
        subject.compute(pair[1], evaluate=evaluate)
    calls = ([call for call in calls.made if call.line] for calls in (whole, alone))
    count = len(subject.samples)
    for a, b in zip(*calls, strict=False):
        if a.name != b.name or a.line != b.line:
            return ""  # another way was taken
        for one, two in zip(a.given, b.given, strict=False):
            rows = rows_of(one, pair[1], count, two)
            known = rows is not None or not one.is_floating_point()
            if (rows is None and known) or (rows is not None and not rows.is_floating_point()):
                continue
            if rows is None or differ(rows, two, subject.dtype):
                return a.line
    return ""
