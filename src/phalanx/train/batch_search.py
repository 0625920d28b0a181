"""The largest micro-batch that fits: tried on fresh ranks, each twice as large, then between what did and did not."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

from phalanx.data.adopted import training_samples
from phalanx.data.kinds import length
from phalanx.errors import WrongUse
from phalanx.train.engine import Engine
from phalanx.train.job import Job
from phalanx.train.thawed import thawed
from phalanx.train.trying import attempt

MOST = 1024
UNITS = {"B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class Fitting:
    """One micro-batch, tried."""

    size: int
    fits: bool
    peak: int
    """Bytes that the fullest rank held; 0 if it did not come to its end."""


@dataclass(frozen=True)
class Search:
    """All that were tried, in their order."""

    tried: list[Fitting]
    most: int
    """No more were to be tried: so it was asked for, or there are no more samples."""

    @property
    def largest(self) -> int:
        """The largest that fits; 0 if none does."""
        return max((one.size for one in self.tried if one.fits), default=0)


def bytes_of(text: str) -> int:
    """``4GiB``, ``500M``, ``1.5 GB``, in binary units."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    size = 0 if found is None else round(float(found[1]) * UNITS[found[2].upper() or "B"])
    if not size:
        raise WrongUse(f"--memory {text} is no amount of memory. Write it like 4GiB or 500MiB.")
    return size


def largest_that_fits(fits: Callable[[int], bool], most: int) -> int:
    """By doubling, then halving what is between; 0 if 1 does not."""
    good, bad = 0, most + 1
    size = 1
    while good + 1 < bad:
        if fits(size):
            good = size
        else:
            bad = size
        size = min(2 * good, most) if bad > most else (good + bad) // 2
    return good


def search(job: Job, memory: int | None, steps: int, most: int, tell: Callable[[Fitting], object]) -> Search:
    """``memory``: bytes that a rank may hold; None: as much as its device has."""
    if memory is None and job.cluster.device == "cpu":
        raise WrongUse(
            "on a CPU it must be said how much memory a rank may hold. Give --memory, such as --memory 4GiB."
        )
    if steps < 1 or most < 1:
        raise WrongUse(f"--steps {steps} and --most {most} try nothing. Give 1 or more of both.")
    job = replace(job, task=thawed(job.task, 0))  # what is trained later takes memory later
    layout, tried = job.layout, dict[int, Fitting]()
    at_once = layout.batch_ranks * max(2, layout.stages)
    samples = length(training_samples(job.task), "data", job.task)
    if samples < at_once:
        raise WrongUse(f"there are {samples} samples, and {layout} computes {at_once} at a time. Give it more data.")
    most = min(most, samples // at_once)

    def fits(size: int) -> bool:
        found = attempt(
            job, partial(stepped, steps=steps), replace(layout, micro_batch=size), steps=steps,
            global_batch=size * at_once, evaluate_every=0, known=Path(known),
        )  # fmt: skip
        if not found.exhausted:
            found.or_refuse()
        good = not found.exhausted and (memory is None or found.peak <= memory)
        tried[size] = Fitting(size, good, found.peak)
        tell(tried[size])
        return good

    with tempfile.TemporaryDirectory() as known:
        largest_that_fits(fits, most)
    return Search(list(tried.values()), most)


def stepped(engine: Engine, steps: int) -> int:
    """On each rank: with the second step there are moments, gradients and activations at once."""
    for batch in islice(engine.batches(), steps):
        engine.step(batch)
    return engine.step_number
