"""What each rank of a job does: everything that a run needs made in order, then the loop."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta

from phalanx import streams
from phalanx.checkpoint.frozen import leaves_out
from phalanx.checkpoint.manager import CheckpointManager
from phalanx.checkpoint.slot import Slot
from phalanx.events import EventLog, pause_of, writers
from phalanx.launch import stacks
from phalanx.launch.environment import Environment
from phalanx.launch.heartbeats import ARRIVED, RankHeartbeat
from phalanx.launch.supervisor import Host
from phalanx.layout import Layout
from phalanx.origin import kept_origin
from phalanx.parallel.communication.outside import record_outside
from phalanx.parallel.communication.recorder import FlightRecorder
from phalanx.parallel.communication.traffic import Traffic
from phalanx.run import Run
from phalanx.train.check.beside import Check, settle
from phalanx.train.checkpointing import Checkpointer
from phalanx.train.dead_gradients import DeadGradients
from phalanx.train.doctor import check_hosts
from phalanx.train.engine import Engine
from phalanx.train.guard import Guard
from phalanx.train.job import Job
from phalanx.train.loop import Listener, Loop
from phalanx.train.neighbours import has_all_on_every_host
from phalanx.train.overview import Overview
from phalanx.train.placing import fitted
from phalanx.train.profile.attached import profiled
from phalanx.train.profile.exhausted import memory_told
from phalanx.train.restoring import Restorer
from phalanx.train.step import Metrics
from phalanx.train.summary import Summary
from phalanx.train.utilisation import Utilisation, peak_of
from phalanx.watch.loggers import Logger
from phalanx.watch.loggers.chosen import chosen
from phalanx.watch.screen import Screen


@dataclass
class Rank:
    """A rank of one generation of a job's."""

    job: Job
    run: Run
    manager: CheckpointManager
    resume: bool
    host: Host

    def __post_init__(self) -> None:
        self.layout = self._layout()
        self.environment = Environment.detect()
        self.own, self.guests = (
            [[Slot(memory) for memory in slots] for slots in by_rank]
            for by_rank in (self.host.memory, self.host.guests)
        )
        """By rank of this host: its slots, and those for copies of the host before."""

    def _layout(self) -> Layout:
        """The job's, or the closest to it for as many ranks as there are now."""
        task, layout = self.job.task, self.job.layout
        if self.host.world == layout.world:
            return layout
        return fitted(layout, task.global_batch, self.host.world, task)

    def train(self) -> Summary:
        """From the newest whole state to the end."""
        options, host, rank = self.job.options, self.host, self.environment.rank
        with ExitStack() as undo:
            log = undo.enter_context(self._log())
            row = host.heartbeats.row(self.environment.local_rank)
            heartbeat = RankHeartbeat(row, options.timeout)
            check = self._check()
            if check is not None:
                undo.enter_context(check)
            recorder = self._recorder()
            undo.callback(record_outside(recorder))
            with memory_told(self.run, rank):
                engine = undo.enter_context(self._engine(Traffic(row[ARRIVED:], recorder)))
            undo.enter_context(memory_told(self.run, rank, engine))
            engine.callbacks.during = engine.traffic.recorder.during
            if rank == 0:
                undo.enter_context(kept_origin(self.run, self.job.task))
                for logger in chosen(options.log, options.metrics_port):
                    engine.callbacks.add(logger)
            engine.callbacks.add(DeadGradients(engine, log.write))
            restorer, checkpointer = self._restorer(engine, log), self._checkpointer(engine, log)
            undo.push(lambda kind, *_: checkpointer.close(wait=kind is None))  # after an error: no wait
            grounds = check_hosts(self.environment, engine.device, self.run.path)
            listener = self._listener(engine, grounds) if rank == 0 else Listener()
            settle(engine, check, log.write, listener.said)
            used = Utilisation.of(engine, self.run, check, listener.said) if rank == 0 else None
            drill = None if host.restarted else options.drill()
            undo.enter_context(
                profiled(options, engine, self.run, host.generation, heartbeat.may_take_long, listener.said)
            )
            return Loop(
                engine,
                self.run,
                log,
                checkpointer,
                restorer,
                heartbeat,
                listener,
                options.compare_steps,
                drill,
                host.stopping,
                used,
            ).train()

    def _log(self) -> EventLog:
        rank, hosts = self.environment.rank, self.environment.hosts
        ring = self.host.events.rings[self.environment.local_rank]
        return EventLog(self.run, rank, pause_of(rank, hosts), shared=rank in writers(hosts), ring=ring)

    def _recorder(self) -> FlightRecorder:
        """Of this rank's last moments; and its stacks are to be had from now on."""
        local, box = self.environment.local_rank, self.host.black_box
        stacks.answer(box.stacks[local])
        return FlightRecorder(box.row(local), self.environment.rank, self.host.world, self.host.generation)

    def _check(self) -> Check | None:
        """Of the task, beside rank 0, unless an earlier generation had it done."""
        if self.environment.rank != 0 or (self.host.restarted and any(self.run.events(0, "check"))):
            return None
        return self.job.start_check()

    def _engine(self, traffic: Traffic) -> Engine:
        options, begins = self.job.options, not self.manager.steps() or leaves_out(self.manager)
        return Engine(
            self.job.task, self.layout, device=self.job.cluster.device, timeout=timedelta(seconds=options.timeout),
            init_from=options.init_from if begins else None, guard=Guard(options.bad, options.spike),
            allow_changes=options.allow == "changes", traffic=traffic, run=self.run,
            loss_tolerance=options.loss_tolerance,
        )  # fmt: skip

    @property
    def _taken_in(self) -> list[list[Slot]]:
        """Slots for copies of the host before that this rank takes in."""
        return self.guests[self.environment.local_rank :: self.job.cluster.world]

    def _restorer(self, engine: Engine, log: EventLog) -> Restorer:
        every = [slot for slots in (*self.own, *self.guests) for slot in slots]
        mine = [*self.own[self.environment.local_rank], *(slot for slots in self._taken_in for slot in slots)]
        return Restorer(engine, self.manager, every, mine, generation=self.host.generation, note=log.write)

    def _checkpointer(self, engine: Engine, log: EventLog) -> Checkpointer:
        return Checkpointer(
            engine, self.manager, self.job.options.policy(), generation=self.host.generation,
            slots=self.own[self.environment.local_rank],
            guests=self._taken_in if self._exchanges else None, note=log.write, settle=log.settle,
        )  # fmt: skip

    @property
    def _exchanges(self) -> bool:
        """Whether hosts keep copies of each other's state. Sites do not: each has what all have agreed on."""
        hosts = self.environment.hosts
        return len(set(hosts)) > 1 and self.layout.local is None and not has_all_on_every_host(self.layout, hosts)

    def _listener(self, engine: Engine, notes: list[str]) -> Listener:
        """Rank 0's screen, begun with what there is to note."""
        task, overview = engine.task, Overview(engine)
        options, out = self.job.options, streams.stdout()
        screen = Screen(
            task.steps, task.counts, engine.device, out, every=options.log_every, quiet=options.quiet,
            peak=peak_of(engine),
        )  # fmt: skip
        if not self.host.restarted:
            loggers = [each for each in engine.callbacks.all if isinstance(each, Logger)]
            logs = {"logs": ", ".join(f"{each.title}: {each.where(self.run)}" for each in loggers)} if loggers else {}
            screen.table(overview.facts() | logs, [*notes, *overview.notes()])
            if self.resume and not self.manager.steps() and self.job.options.meet is None:
                screen.note(f"{self.manager.store.url} holds nothing to go on from: beginning at step 0")

        def step(metrics: Metrics) -> None:
            for news in (*overview.news(), *overview.stepped(metrics)):
                screen.note(news)
            screen.step(metrics)

        return Listener(step, screen.evaluation, screen.resumed, screen.said)
