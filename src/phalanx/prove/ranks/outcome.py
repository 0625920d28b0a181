"""What became of a run on all ranks: what each saw, and what they can only tell together."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

from phalanx.checkpoint.slot import new_memory
from phalanx.errors import WrongUse
from phalanx.launch.forkserver import ForkServer
from phalanx.launch.pool import Answer, Pool
from phalanx.layout import Layout
from phalanx.prove.ladder import Difference
from phalanx.prove.own_faults import is_own
from phalanx.prove.ranks import trial
from phalanx.prove.ranks.record import Record
from phalanx.prove.ranks.resuming import Resume, write_reference
from phalanx.prove.ranks.witness import Testimony
from phalanx.train.agreement import Disagreement

ONE_DEVICE = "one device"


@dataclass
class TrialOutcome:
    """One run of one layout."""

    told: list[Testimony] = field(default_factory=list)
    refusal: str | None = None
    """Why the layout cannot work for this task."""
    unfinished: list[int] = field(default_factory=list)
    stopped: dict[int, trial.Stopped] = field(default_factory=dict)

    @classmethod
    def of(cls, answers: Sequence[Answer], stages: int) -> TrialOutcome:
        """With several ``stages``, one may be what a layout cannot do; otherwise all ranks must have refused it."""
        failed = [answer for answer in answers if answer.failed]
        refused = [a for a in failed if isinstance(a.error, WrongUse) and not isinstance(a.error, Disagreement)]
        if refused and (stages > 1 or len(refused) == len(answers)):
            return cls(refusal=str(refused[0].error))
        stopped = {a.rank: _stop(a) for a in failed if a.error is not None}
        if failed:
            return cls(unfinished=[a.rank for a in failed], stopped=stopped)
        return cls([answer.value for answer in answers])

    @property
    def fails(self) -> bool:
        return bool(self.unfinished or self.differences)

    @property
    def own_fault(self) -> trial.Stopped | None:
        """A rank that stopped with an error of the prover itself, if nothing that it had seen says why."""
        own = (stop for stop in self.stopped.values() if is_own(stop.trace))
        return None if self.seen_before_stopping else next(own, None)

    @property
    def seen_before_stopping(self) -> list[Difference]:
        """What ranks that did not come to their end had noted until then."""
        return [difference for stop in self.stopped.values() for difference in stop.seen]

    @cached_property
    def differences(self) -> list[Difference]:
        """From one device, and of ranks among each other."""
        if not self.told:
            return []
        own = [difference for told in self.told for difference in told.differences]
        return [*own, *self._divided(), *self._disagreements()]

    def _divided(self) -> Iterator[Difference]:
        """Every slot of a step must be computed once, by ranks that have the same samples alike."""
        alike: dict[Any, Testimony] = {}
        for told in self.told:
            alike.setdefault((told.coordinates["dp"], told.coordinates["fsdp"]), told)
        for step in range(len(self.told[0].slots)):
            times = Counter(slot for told in alike.values() for slot in told.slots[step])
            slots = range(self.told[0].metrics[step]["slots"])
            wrong = [slot for slot in slots if times[slot] != 1]
            if wrong:
                counted = ", ".join(f"{slot}: {times[slot]} times" for slot in wrong)
                yield Difference(step, "samples", "division of the batch", math.inf, 0, counted, "each once")

    def _disagreements(self) -> Iterator[Difference]:
        """What ranks hold or decided alike must be so to the last bit."""
        firsts = {told.site: told for told in reversed(self.told)}
        for told in self.told[1:]:
            for step, (here, there) in enumerate(zip(told.metrics, firsts[told.site].metrics, strict=True)):
                there = there | {"round": self.told[0].metrics[step]["round"]}
                for name in here:
                    if repr(here[name]) != repr(there[name]):
                        found, expected = str(here[name]), str(there[name])
                        yield Difference(step, "agreement of ranks", name, math.inf, told.rank, found, expected)
        holders: dict[Any, tuple[int, int]] = {}
        for told in self.told:
            for place, checksum in told.state.items():
                rank, theirs = holders.setdefault(place, (told.rank, checksum))
                if theirs != checksum:
                    step = len(told.metrics) - 1
                    yield Difference(
                        step, "agreement of ranks", f"{place[0]} of {place[1]}", math.inf, told.rank,
                        "other bits", f"those of rank {rank}",
                    )  # fmt: skip


def _stop(answer: Answer) -> trial.Stopped:
    error = answer.error
    return error if isinstance(error, trial.Stopped) else trial.Stopped(str(error), answer.trace, -1, [], [])


class ProofRanks:
    """A pool of ranks that run layouts, with a bug planted if one is named, and what they save."""

    def __init__(self, server: ForkServer, size: int, inject: str | None) -> None:
        self.server, self.size, self.inject = server, size, inject
        self._saved: dict[int, tuple[str, str]] = {}
        """By case, the checkpoint of the last layout that was right, and that layout; at first, one device's."""

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="phalanx-")
        self._memory = [new_memory() for _ in range(2 * self.size)]
        begin = trial.begin, trial.CASES
        self.pool = Pool(self.server, self.size, trial.TIMEOUT, begin=begin, descriptors=self._memory)
        self.pool.patience = None
        return self

    def __exit__(self, *_: Any) -> None:
        self.pool.close()
        for memory in self._memory:
            os.close(memory)
        self._folder.cleanup()

    def attest(self, case: int, layout: Layout, *, interrupted: bool = True, keep: bool = False) -> TrialOutcome:
        """One run. Interrupted half way, it must also take up what the last layout that was kept has saved.

        ``keep``: if this one is right, the next takes up what it saves, and need not be as thorough.
        """
        if not interrupted:
            return self._run(case, layout)
        elsewhere, saver = self._elsewhere(case)
        resume = Resume(tempfile.mkdtemp(dir=self._folder.name), elsewhere, not keep or saver == ONE_DEVICE)
        outcome = self._run(case, layout, resume)
        done = resume.folder
        if keep and not outcome.fails and outcome.refusal is None:
            done, self._saved[case] = elsewhere, (resume.folder, str(layout))
        shutil.rmtree(done)
        return outcome

    def _run(self, case: int, layout: Layout, *resume: Resume) -> TrialOutcome:
        return TrialOutcome.of(self.pool.ask(layout.world, trial.attest, case, layout, self.inject, *resume), layout.pp)

    def saved_by(self, case: int) -> str:
        """The layout whose checkpoint the next run takes up."""
        return self._elsewhere(case)[1]

    def _elsewhere(self, case: int) -> tuple[str, str]:
        if case not in self._saved:
            folder = tempfile.mkdtemp(dir=self._folder.name)
            held = trial.CASES[case]
            write_reference(held.task, held.standard, folder, held.half, held.sites)
            self._saved[case] = folder, ONE_DEVICE
        return self._saved[case]

    def record(self, case: int, layout: Layout, step: int) -> list[Record]:
        return [a.value for a in self.pool.ask(layout.world, trial.record, case, layout, self.inject, step)]
