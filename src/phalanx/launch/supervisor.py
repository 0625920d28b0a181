"""The supervisor of a host: generation after generation of ranks, until the job is done or cannot be.

It is the warm process that ranks are forked from. What must outlive them is in its hands: the memory with their last
states, their signs of life, the count of generations. A rank that died, hung or was lost costs the others their lives
(gloo cannot be interrupted) and the job a fork. Supervisors of several hosts meet (`launch.rendezvous`) before each
generation, and their ranks make one world.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from phalanx.errors import CannotHere
from phalanx.events import EventLog
from phalanx.launch import network
from phalanx.launch.black_box import BlackBox
from phalanx.launch.event_writer import EventWriter
from phalanx.launch.heartbeats import STEPS, Heartbeats, Watch
from phalanx.launch.local import Failure, HostOutcome, World, run_ranks
from phalanx.launch.rendezvous import Rendezvous, RunIsFinished
from phalanx.launch.shared import Shared
from phalanx.launch.stopping import ENDING, GRACE, Stop, handled
from phalanx.redact import redact
from phalanx.run import FolderHeld, Run
from phalanx.words import many

FRUITLESS = 3
"""So many generations may fail in a row without a step more than before."""
WAITING_SECONDS = 2.0
"""A host that waits for others says so after so long, and when it waits for others than before, no sooner."""
HOLD_SECONDS = 10.0
"""How long a host that has become the first waits for the folder of one that was lost."""


@dataclass
class Host:
    """What a rank is given by its host: the number of its generation, and memory that outlives it."""

    generation: int
    world: int
    """Ranks of all hosts together."""
    heartbeats: Heartbeats
    black_box: BlackBox
    events: EventWriter
    memory: list[list[int]]
    """By rank of this host, a file descriptor a slot."""
    guests: list[list[int]] = field(default_factory=list)
    """Likewise for copies of ranks of the host before; that of number i is taken in by rank i modulo the ranks here."""
    restarted: bool = False
    stopping: bool = False
    """The job was asked to stop when ranks had failed: what memory holds of their steps is saved, and no more done."""


@dataclass
class Supervisor:
    """Runs ``program`` on this host's ranks; starts them again from the newest whole state when something fails."""

    run: Run
    ranks: int
    new_memory: Callable[[], int]
    """Makes memory that outlives a rank."""
    restarts: int = FRUITLESS
    grace: float = GRACE
    rendezvous: Rendezvous | None = None
    """Where it meets those of other hosts; None: there are none."""
    takes_part: Callable[[list[int]], int] = len
    """Of hosts with so many ranks each, how many of the first can be used; the others stand by."""
    shared: Shared | None = None
    """What hosts that meet must all see."""
    concluded: Callable[[], object] = lambda: None
    """Called by the first host when all its ranks have ended well, before any host goes home."""
    begun: Callable[[], int] = lambda: 0
    """The newest generation that the run's checkpoints know of, whose number its folder may have lost."""
    saved: Callable[[], int] = lambda: 0
    """Up to which step the run is saved in files."""
    drill: tuple[int, int] | None = None
    """A rank that kills itself after a step."""
    recoveries: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.heartbeats = Heartbeats(self.ranks)
        self.black_box = BlackBox(self.run, self.ranks, self.new_memory)
        self.events = EventWriter(self.run, self.ranks)
        self.memory = [[self.new_memory(), self.new_memory()] for _ in range(self.ranks)]
        self.guests: list[list[int]] = []
        self.reached, self.fruitless, self.leniency = 0, 0, 1.0
        self._raised: tuple[str, int] | None = None
        """What the last generation raised, and how many steps were done then."""
        self._furthest = 0
        self._leaving = ""
        self.leads = self.rendezvous is None
        """Whether this is the first host, which has rank 0 and speaks for all."""
        self.spare = False
        """Whether the run came to its end without this host."""
        self._held = ExitStack()
        self.stop = Stop(self.grace, lambda: self.done() > 0)

    def supervise(self, program: Callable[[Host], Any]) -> HostOutcome:
        """Generation after generation."""
        gc.freeze()  # once: to search all that is here for garbage again would hold up every generation
        try:
            with self._held, self.black_box:
                return self._generations(program)
        finally:
            if self.shared is not None:
                self.shared.close()
            gc.unfreeze()

    def heeding(self) -> AbstractContextManager[None]:
        """Meanwhile requests to end are noted, also while hosts meet and between two generations."""
        return handled(ENDING, lambda number, frame: self.stop.heard(number))

    def done(self) -> int:
        """How many steps were done, by any generation and any rank."""
        self._furthest = max(self._furthest, self.heartbeats.furthest())
        return self._furthest

    def _generations(self, program: Callable[[Host], Any]) -> HostOutcome:
        while True:
            self.done()
            self.heartbeats.clear()
            self._leaving = ""
            gathered = self._gather()
            if gathered is None:
                return HostOutcome(interrupted=self.stop.asked)
            world, generation = gathered
            host = Host(
                generation, world.size or self.ranks, self.heartbeats, self.black_box, self.events, self.memory,
                self.guests, self.recoveries > 0, stopping=self.rendezvous is None and self.stop.asked,
            )  # fmt: skip
            watch = Watch(self.heartbeats, world.first, self.leniency, alone=world.size in (0, world.ranks))
            look = partial(self._look, watch)
            self.black_box.begin(generation, world.first, host.world)
            self.events.begin(world.first)
            given = world, look, self.stop, self.black_box.collect, self.events.start
            outcome = run_ranks(partial(program, host), *given) if world.ranks else self._stand_by()
            self.events.end()
            failures = [self._drilled(failure, world) for failure in outcome.failures or ()]
            outcome.failures = [self.black_box.filed(failure, generation) for failure in failures] or None
            self.black_box.over(outcome.failures or (), self.heartbeats.steps(), bool(outcome.interrupted))
            if self._over(outcome, generation, host.stopping):
                return outcome
            self.recoveries += 1

    def _drilled(self, failure: Failure, world: World) -> Failure:
        """One that was asked for is called so."""
        if self.recoveries or not failure.by_signal or self.drill is None or failure.rank != self.drill[0]:
            return failure
        if self.heartbeats.row(failure.rank - world.first)[STEPS] != self.drill[1]:
            return failure
        return replace(failure, reason=f"was ended by SIGKILL, the drill of --kill {self.drill[0]}@{self.drill[1]}")

    def _gather(self) -> tuple[World, int] | None:
        """Where this host's ranks stand, and which generation they are; None if it is to end, or has without it."""
        if self.rendezvous is None:
            return World(self.ranks), self.run.next_generation(self.begun() + 1)
        self._say(f"   host  meets others at {self.rendezvous.address}, {self.rendezvous.min_nodes} of them at least")
        try:
            met = self.rendezvous.next(after=max(self.run.generation(), self.begun()), asked=self._waiting())
        except RunIsFinished:
            met, self.spare = None, not self.recoveries
        if met is None:
            if not self.stop.asked:
                self._say("   host  the others have come to the end of the run meanwhile")
                self.leads = False
            self.rendezvous.leave("was asked to stop" if self.stop.asked else "came back when it was done")
            return None
        used = max(1, self.takes_part(met.ranks))  # what fits nowhere is refused by its ranks, in words
        if self.shared is not None and met.nodes > 1:
            self.shared.check(met, lambda: self.stop.asked)
        if met.node == 0 and not self.leads:
            self._hold()
        self.leads = met.node == 0
        if self.stop.asked:  # while the folder was looked at, or waited for
            if met.listening is not None:
                met.listening.close()
            self.rendezvous.leave("was asked to stop")
            return None
        if self.leads:
            self.run.next_generation(met.generation)
        senders = met.ranks[(met.node - 1) % used] if used > 1 and met.node < used else 0
        while len(self.guests) < senders:
            self.guests.append([self.new_memory(), self.new_memory()])
        world = World(
            self.ranks if met.node < used else 0, sum(met.ranks[: met.node]), sum(met.ranks[:used]),
            ",".join(map(str, met.ranks[:used])), met.address, met.port, met.listening,
            self.rendezvous.key,
            network.variables(met.interface, insist=self.rendezvous.interface is not None),
        )  # fmt: skip
        self._say(
            f"   host  {met.node + 1} of {met.nodes}, generation {met.generation}, {many(world.size, 'rank')} in all"
        )
        return world, met.generation

    def _waiting(self) -> Callable[[], bool]:
        """Whether to wait no longer: somebody wants it to end, or others have ended it while this host was cut off.

        For whom it waits is said when that changes.
        """
        assert self.rendezvous is not None
        rendezvous, said, looked = self.rendezvous, "", time.monotonic()

        def asked() -> bool:
            nonlocal said, looked
            if time.monotonic() - looked > WAITING_SECONDS:
                looked = time.monotonic()
                if (awaited := rendezvous.awaited()) and awaited != said:
                    said = awaited
                    self._say(f"   host  {awaited}")
                if self.recoveries and self.run.certificate_path.exists():
                    return True
            return self.stop.asked

        return asked

    def _hold(self) -> None:
        """Hold the run's folder, as the first host does; not against one of this rendezvous that was cut off."""
        assert self.rendezvous is not None
        purpose = f"for the rendezvous at {self.rendezvous.address}"
        try:
            self._held.enter_context(self.run.held(HOLD_SECONDS, purpose))
        except FolderHeld as refusal:
            if refusal.purpose != purpose:
                raise
            self._say(
                f"   note  {refusal} It was the first host; its generation is over, and it can save nothing more."
            )

    def _stand_by(self) -> HostOutcome:
        """This host's ranks cannot be used for now: wait until others come or go."""
        assert self.rendezvous is not None
        self._say("   host  stands by: no layout uses its ranks too")
        self.rendezvous.finish("stood by")  # the others need not wait for it
        while not self.stop.asked:
            change = self.rendezvous.changed()
            if change is not None or self.rendezvous.finished is not None:
                return HostOutcome(over=change.why if change else "the run is finished")
            time.sleep(0.1)
        return HostOutcome(interrupted=True)

    def _look(self, watch: Watch, pids: dict[int, int]) -> Failure | str | None:
        seen = watch.look(pids)
        self.black_box.look(pids)
        if seen is not None:
            self.black_box.collect(pids)
            return Failure(seen[0], time.monotonic(), seen[1], by_signal=True, stuck=True)
        change = self.rendezvous.changed() if self.rendezvous is not None else None
        if change is None:
            return None
        if change.urgent:
            return change.why
        if not self._leaving and self.heartbeats.steps():  # they save and end after a step that all of them agree on
            self._leaving = change.why
            for pid in pids.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        return None

    def _over(self, outcome: HostOutcome, generation: int, stopping: bool) -> bool:
        """Whether this was the last generation on this host."""
        if self.rendezvous is None:
            if not outcome.failures or (self.stop.asked and (stopping or not self._unsaved())):
                return True
            return not self._again(outcome.failures[0], generation)
        if outcome.interrupted and not outcome.finished:
            self.rendezvous.leave("was asked to stop")
            return True
        if self.shared is not None and not self.recoveries and (unshared := self.shared.unshared()):
            raise CannotHere(unshared)  # later, when all were well before, the others go on without that host
        if outcome.failures:
            return self._failed_here(outcome.failures[0], generation)
        if outcome.over:  # another host's trouble, which is that host's to count
            self._say(f"  again  {outcome.over}; meeting the others again")
            return self.rendezvous.finished is not None
        if getattr(outcome.result, "stopped", False):
            self._say(f"  again  {self._leaving or 'another host leaves'}; meeting the others again")
            return False
        if self.leads:
            self.concluded()
        self.rendezvous.finish("done")
        while self.rendezvous.finished is None and not self.stop.asked:
            change = self.rendezvous.changed()
            if change is not None and change.urgent:
                return False  # another host failed after this one's ranks had ended: all go back together
            time.sleep(0.05)
        self.rendezvous.close()
        return True

    def _unsaved(self) -> bool:
        """Whether ranks did steps that memory may hold and files do not, with time left to write them."""
        return self.stop.left > 0 and self.done() > self.saved()

    def _failed_here(self, first: Failure, generation: int) -> bool:
        """Ranks of this host failed, among others'; whether that was the last time."""
        assert self.rendezvous is not None
        deadline = time.monotonic() + self.rendezvous.silence
        while first.secondary and time.monotonic() < deadline:  # they lost sight of others: was a host lost?
            change = self.rendezvous.changed()
            if change is not None and change.urgent:
                self._say(f"  again  {change.why}; meeting the others again")
                return False
            time.sleep(0.05)
        self.rendezvous.failed(f"rank {first.rank} {first.reason}")
        if self._again(first, generation):
            return False
        self.rendezvous.leave(first.reason)
        return True

    def _again(self, first: Failure, generation: int) -> bool:
        """Whether to start again: not what the user must mend, not what failed before its first step, not for ever."""
        steps = self.heartbeats.steps()
        if first.by_signal:  # one that raised has noted it itself
            with EventLog(self.run, first.rank) as log:
                log.write("failure", reason=first.reason, step=steps, generation=generation, stuck=first.stuck)
        passing = first.by_signal or first.worker_killed
        if first.final or not (steps or self.reached or passing):
            return False
        self.fruitless = 0 if steps > self.reached else self.fruitless + 1
        self.reached = max(self.reached, steps)
        longer = ""
        if first.stuck:
            self.leniency *= 2  # it may have been slow only: the next one gets more time
            longer = f"; from now on ranks may stand still {self.leniency:g} times as long as at first"
        who = f"rank {first.rank} {first.reason}"
        before, self._raised = self._raised, None
        if not (passing or first.secondary or first.stuck or first.may_pass):
            self._raised = first.reason, steps
            if self._raised == before:
                self._say(f"   stop  {who}; it was the same the time before, after the same step")
                return False
        if self.fruitless >= self.restarts:
            ended = f"{many(self.fruitless, 'generation')} in a row ended before step {self.reached + 1}"
            self._say(f"   stop  {who}; {ended}")
            return False
        self._say(f"  again  {who}; {self.reached} steps were done, starting again{longer}")
        return True

    @staticmethod
    def _say(line: str) -> None:
        print(redact(line), file=sys.stderr, flush=True)
