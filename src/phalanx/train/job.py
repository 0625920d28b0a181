"""A training job as a user asks for it: what to train, how to spread it, where to run it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from phalanx import inventory, streams, user_code
from phalanx.checkpoint.manifest import Damaged
from phalanx.checkpoint.shelf import Shelf
from phalanx.checkpoint.slot import Slot, new_memory
from phalanx.checkpoint.store import Folder, open_store
from phalanx.checkpoint.verify import final_differs
from phalanx.cluster import Cluster
from phalanx.data.loader import seed_globally
from phalanx.data.order import Order
from phalanx.errors import CannotHere, WrongUse, closest
from phalanx.events import EventLog, pause_of, plain, writers
from phalanx.files import content, exists, put_back
from phalanx.launch.beats import ARRIVED, Beat
from phalanx.launch.environment import Environment
from phalanx.launch.key import Key
from phalanx.launch.local import Outcome
from phalanx.launch.meeting import Meeting
from phalanx.launch.shared import Shared
from phalanx.launch.stopping import Stop
from phalanx.launch.supervisor import Host, Supervisor
from phalanx.layout import Layout
from phalanx.origin import kept_origin
from phalanx.parallel.communication import collectives
from phalanx.parallel.spread import check_model
from phalanx.parallel.weights.blueprint import Blueprint
from phalanx.precision import DTYPES
from phalanx.proofs import said
from phalanx.references import find_task, short_name
from phalanx.run import Run, read_settings
from phalanx.settings import make_task, over, parse_assignments, plain_settings, unwritten
from phalanx.task import Task
from phalanx.train.certificate import NotDone, certify, in_words
from phalanx.train.check.beside import Check, settle
from phalanx.train.choosing import full_reference
from phalanx.train.ending import failed, left, not_done, stopped, trained
from phalanx.train.engine import Engine, length
from phalanx.train.folders import check_there, held_store
from phalanx.train.guard import Guard
from phalanx.train.keeping import Keeper
from phalanx.train.loop import Listener, Loop, Summary
from phalanx.train.options import Options
from phalanx.train.placing import fitted, hosts_used, place, ranks_of
from phalanx.train.restoring import Restorer
from phalanx.verdict import Verdict
from phalanx.watch.screen import Screen
from phalanx.words import many

LINGER_SECONDS = 1.0
"""How long the ranks of a supervisor that was killed may take to end, and hold its run until then."""


@dataclass(frozen=True)
class Job:
    """Everything resolved and checked, so far as it can be without building the model."""

    reference: str
    task: Task
    layout: Layout
    cluster: Cluster
    options: Options

    @classmethod
    def resolve(
        cls,
        *,
        task: str | None,
        layout: str | None,
        on: str | None,
        assignments: Sequence[str],
        steps: int | None,
        epochs: float | None = None,
        config: Path | None,
        device: str | None,
        resume: bool = False,
        exact: bool = False,
        **options: Any,
    ) -> Job:
        """From the command line's words, over those of a ``run.toml`` if one is given."""
        torch.set_num_threads(1)  # a task file may compute while it is imported, and no thread may survive into a fork
        saved = read_settings(config) if config else {}
        ran: Mapping[str, Any] = saved.get("run", {})
        known = ("task", "layout", "on", "device", "folder", *(f.name for f in fields(Options)))
        for table, names in (("table", [n for n in saved if n not in ("run", "settings")]), ("key", ran)):
            for name in names:
                if table == "table" or name not in known:
                    raise WrongUse(f"{config} has a {table} {name!r} that means nothing; {closest(name, known)}")
        for name in known[:5]:
            if not isinstance(ran.get(name, ""), str):
                raise WrongUse(f"{name} = {ran[name]!r} in {config} is not text. Mend that line.")
        if config and not ran.get("task") and (resume or not saved):
            raise WrongUse(
                f"{config} names no task: it is empty, or was cut short. Put back a copy of it, or remove it and give "
                "the task and all its settings again."
            )
        if os.environ.get("WORLD_SIZE", "") not in ("", "1") and "TORCHELASTIC_RUN_ID" in os.environ:
            raise WrongUse(
                "phalanx train starts its ranks itself, and torchrun would start one such job a process. Use --on "
                "local:N without torchrun, or phalanx.Engine in a program of your own with it."
            )
        reference = task or ran.get("task")
        if reference is None:
            raise WrongUse("there is no task to train. Name one: phalanx train gpt, or phalanx train file.py")
        kind = find_task(reference, ran.get("folder") if task is None else None)
        short = {name: value for name, value in (("steps", steps), ("epochs", epochs)) if value is not None}
        values = over(saved.get("settings", {}), parse_assignments(assignments) | short)
        made = make_task(kind, values)
        if made.epochs:
            seed_globally(made.seed, "data")
            made.plan_steps(length(made.data(), "data", made))
        if resume and config:
            for name, value in plain_settings(made).items():
                if name not in values:
                    print(f"   note  {config} does not say what {name} is: it is {value} now")
        for name in unwritten(made) if config else ():
            if name not in values:
                print(f"   note  {config} cannot say what {name} is: it is as in the code")
        settled = Options.resolve(options, ran)
        if resume and on and not layout and "layout" in ran:  # the same on another number of ranks: as close as can be
            layout = str(fitted(Layout.parse(ran["layout"]), made.global_batch, ranks_of(on) * settled.max_nodes))
        chosen, ranks = place(
            layout or (None if on else ran.get("layout")), on or (None if layout else ran.get("on")), settled.max_nodes
        )
        if exact:
            before = Layout.parse(ran["layout"]).exact if "layout" in ran else 0
            chosen = replace(chosen, exact=chosen.exact or before).exactly(made.global_batch)
        if settled.meet is None or not hosts_used(chosen, made.global_batch, [ranks] * settled.max_nodes):
            chosen.check(made.global_batch, ranks * settled.max_nodes)
        drill = settled.drill()
        if drill and not (drill[0] < ranks * settled.max_nodes and 0 < drill[1] <= made.steps):
            raise WrongUse(
                f"--kill {settled.kill} would kill nobody: there are ranks 0 to {ranks * settled.max_nodes - 1} and "
                f"{made.steps} steps. Choose a rank and a step of those."
            )
        return cls(reference, made, chosen, Cluster.here(ranks, device or ran.get("device")), settled)

    def describe(self) -> str:
        """What would run, with the model described and the data opened."""
        model = Blueprint(self.task.model, self.task.seed).model
        anatomy = self.task.anatomy(model)
        check_model(self.layout, model, anatomy)
        seed_globally(self.task.seed, "data")
        order = Order(length(self.task.data(), "data", self.task), self.task.global_batch, self.task.seed)
        settings = ", ".join(f"{name}={value}" for name, value in plain_settings(self.task).items())
        dtypes = DTYPES[self.task.precision]
        lines = {
            "task": f"{self.reference} ({type(self.task).__name__})",
            "set": settings,
            "layout": f"{self.layout} on {self.cluster.describe()}",
            "model": anatomy.describe(),
            "memory": f"about {inventory.described_memory(self.task, model, anatomy, self.layout, dtypes)}",
            "data": f"{many(order.size, 'sample')}, {many(order.steps_per_epoch, 'step')} an epoch",
            "micro": many(self.layout.micro_batches(self.task.global_batch), "micro-batch", "micro-batches")
            + " a step",
            "dtypes": dtypes.table(),
        }
        told = [f"{name:>7}  {text}" for name, text in lines.items()]
        told += ["", *(f"         {line}" for line in inventory.table(inventory.parts(model, anatomy)))]
        device = self.cluster.device
        notes = self.layout.notes(device, self.layout.micro_batches(self.task.global_batch)) + dtypes.notes(device)
        return "\n".join([*told, *(f"   note  {note}" for note in notes)])

    def check(self) -> list[str]:
        """Refuse a task that would be refused before its first step; what else there is to say of it, a line each."""
        with self._check() as check:
            return check.result().or_refuse().told()

    def _check(self) -> Check:
        return Check(self.task, self.options.init_from is not None, self.options.unchecked)

    def train(self, path: Path | None, resume: bool = False) -> Verdict:
        """Run it to the end, in a new folder, or in that of a run that did not come to its own."""
        self.cluster.check_room()
        name = short_name(self.reference)
        if self.options.meet is not None:
            if path is None:
                raise WrongUse("several hosts need one folder that all of them see. Give it with --run.")
            run = Run.folder(path, name)  # the first host will hold it
            shelf = Shelf(open_store(self.options.checkpoints or run.checkpoints_path))
            check_there(run, shelf)
            return self._train_or_put_back(run, shelf, resume=True)
        new = path is None or not exists(path)
        run = Run.folder(path, name) if resume else Run.create(path, name)
        shelf = Shelf(open_store(self.options.checkpoints or run.checkpoints_path))
        check_there(run, shelf)
        with run.held(LINGER_SECONDS), held_store(shelf.store):
            if not resume:
                run.check_free()  # somebody may have been faster
            verdict = self._train_or_put_back(run, shelf, resume)
            if new and verdict.exit_code in (2, 3) and not run.ledger() and not shelf.steps():
                shutil.rmtree(run.path)  # it did nothing, and its name should be free for the next try
        return verdict

    def _train_or_put_back(self, run: Run, shelf: Shelf, resume: bool) -> Verdict:
        """What was refused is not what the run is: its settings and its certificate stay as they were."""
        before = {path: content(path) for path in (run.settings_path, run.certificate_path)}
        if self.options.meet is not None:
            before.clear()  # they are the first host's, which may have gone on since
        try:
            verdict = self._train(run, shelf, resume)
        except (WrongUse, CannotHere):
            put_back(before)
            raise
        if verdict.exit_code in (2, 3):
            put_back(before)
        return verdict

    def _train(self, run: Run, shelf: Shelf, resume: bool) -> Verdict:
        options = self.options
        if shelf.steps() and not resume:
            raise WrongUse(
                f"{shelf.store.url} holds checkpoints already, up to step {max(shelf.steps())}. Go on from them with "
                "--resume, or give another folder with --checkpoints."
            )
        done = run.certified_plan()
        if resume and done is not None and done >= self.task.steps and not self._final_differs(run, shelf):
            if done > self.task.steps:
                at = run.certified_steps()
                raise WrongUse(f"{run.path} is finished at step {at}. Give more --steps to go on, or leave them out.")
            try:
                known = [f"weights: {run.weights_path}", self._certified(run, shelf)]
                return Verdict(True, f"{run.path} is finished", known)
            except (NotDone, Damaged) as reason:
                return not_done(run, reason)
        saved = max(shelf.steps(), default=0)
        if resume and saved > self.task.steps:
            raise WrongUse(f"{run.path} is at step {saved} already. Give --steps {saved + 1} or more, or leave it out.")
        user_code.remember()  # now, before it is edited: ranks are forked from this process
        run.certificate_path.unlink(missing_ok=True)  # of a shorter run, which goes on now
        words = {
            "task": full_reference(self.reference),
            "folder": str(Path.cwd()),
            "layout": str(self.layout),
            "on": f"local:{self.cluster.world}",
            "device": self.cluster.device,
            **options.to_repeat(),
        }
        proven = said(self.task, plain_settings(self.task), self.layout, run.path.parent, self.reference)
        if proven:
            print(f"  proof  {proven}", flush=True)
        if options.meet is None or not run.settings_path.exists():
            run.write_settings({"run": words, "settings": plain_settings(self.task)})
        meeting = shared = None
        if options.meet is not None:
            meeting = Meeting(
                options.meet, key=Key.of_run(run.path), name=str(run.path.resolve()), ranks=self.cluster.world,
                min_nodes=options.min_nodes, max_nodes=options.max_nodes, host=options.host, patience=options.timeout,
                interface=options.interface,
                terms={**options.to_repeat(), **plain({"layout": str(self.layout), **plain_settings(self.task)})},
            )  # fmt: skip
            shared = Shared(meeting, Folder(run.path), shelf.store)
        supervisor = Supervisor(
            run, self.cluster.world, new_memory, options.restarts, options.grace, meeting,
            partial(hosts_used, self.layout, self.task.global_batch), shared, partial(self._certified, run, shelf),
            shelf.generation, lambda: max(shelf.steps(), default=0), options.drill(),
        )  # fmt: skip
        with supervisor.heeding():
            return self._supervised(supervisor, run, shelf, resume)

    def _supervised(self, supervisor: Supervisor, run: Run, shelf: Shelf, resume: bool) -> Verdict:
        shared = supervisor.shared
        try:
            outcome = supervisor.supervise(partial(self._rank, run, shelf, resume))
        except (NotDone, Damaged) as reason:
            return not_done(run, reason)
        finally:
            if supervisor.meeting is not None:
                supervisor.meeting.close()
        if not supervisor.leads and not outcome.failures and (outcome.finished or not outcome.interrupted):
            if run.certified_plan() != self.task.steps and not (shared and shared.private):
                return not_done(run, NotDone("there is no certificate"))
            return Verdict(True, f"done: the first host says what came of it, in {run.path}")
        verdict = self._verdict(run, shelf, outcome, supervisor.stop, supervisor.done())
        if supervisor.recoveries:
            times = "once" if supervisor.recoveries == 1 else f"{supervisor.recoveries} times"
            verdict.evidence.append(f"ranks were started again {times}")
        return verdict

    @staticmethod
    def _final_differs(run: Run, shelf: Shelf) -> bool:
        """Whether the weights of a run that was finished are not there any more as they were."""
        try:
            return bool(final_differs(run.weights_path, shelf.open(max(shelf.steps(), default=0)).manifest))
        except (Damaged, OSError):
            return True

    def _rank(self, run: Run, shelf: Shelf, resume: bool, host: Host) -> Summary:
        """What each rank does."""
        options = self.options
        layout = self.layout
        if host.world != layout.world:
            layout = fitted(layout, self.task.global_batch, host.world, self.task)
        with ExitStack() as undo:
            environment = Environment.detect()
            rank, hosts = environment.rank, environment.hosts
            log = undo.enter_context(EventLog(run, rank, pause_of(rank, hosts), shared=rank in writers(hosts)))
            row = host.beats.row(environment.local_rank)
            collectives.signs = row[ARRIVED:]
            beat = Beat(row, options.timeout)
            check = None
            if environment.rank == 0 and not (host.restarted and any(run.events(0, "check"))):
                check = undo.enter_context(self._check())
            engine = Engine(
                self.task, layout, device=self.cluster.device, timeout=timedelta(seconds=options.timeout),
                init_from=None if shelf.steps() else options.init_from, guard=Guard(options.bad, options.spike),
                allow_changes=options.allow == "changes",
            )  # fmt: skip
            undo.enter_context(engine)
            if rank == 0:
                undo.enter_context(kept_origin(run, self.task))
            own, guests = ([[Slot(m) for m in slots] for slots in by_rank] for by_rank in (host.memory, host.guests))
            every = [slot for slots in (*own, *guests) for slot in slots]
            here = environment.local_rank
            mine = guests[here :: self.cluster.world]
            restorer = Restorer(
                engine, shelf, every, [*own[here], *(slot for slots in mine for slot in slots)],
                generation=host.generation, note=log.write,
            )  # fmt: skip
            keeper = Keeper(
                engine, shelf, options.policy(), generation=host.generation, slots=own[here],
                guests=mine if len(set(environment.hosts)) > 1 else None, note=log.write,
            )  # fmt: skip
            undo.push(lambda kind, *_: keeper.close(wait=kind is None))  # after an error there is nothing to wait for
            listener = Listener()
            if environment.rank == 0:
                screen = Screen(engine, streams.stdout())
                if not host.restarted:
                    screen.start()
                listener = Listener(screen.step, screen.evaluation, screen.resumed, screen.said)
                if resume and not host.restarted and not shelf.steps() and options.meet is None:
                    screen.said(f"   note  {shelf.store.url} holds nothing to go on from: beginning at step 0")
            settle(engine, check, log.write, listener.said)
            drill = None if host.restarted else options.drill()
            loop = Loop(engine, run, log, keeper, restorer, beat, listener, options.compare_steps, drill, host.stopping)
            return loop.train()

    def _certified(self, run: Run, shelf: Shelf) -> str:
        """One line: what is certain about a run that is done."""
        return in_words(certify(run, self.task, shelf))

    def _verdict(self, run: Run, shelf: Shelf, outcome: Outcome, stop: Stop, done: int) -> Verdict:
        if self.options.meet is not None and outcome.interrupted and not outcome.finished:
            return left(run, shelf, done)
        if outcome.interrupted and not outcome.finished:
            return stopped(run, shelf, outcome.failures or [], stop.cut_short, done)
        if outcome.failures:
            return failed(run, shelf, outcome.failures)
        if outcome.result is None:
            return Verdict(False, "a rank left before the end, by sys.exit perhaps", next="Take that out of the task.")
        try:
            return trained(run, shelf, self.task, outcome.result, self._certified(run, shelf))
        except (NotDone, Damaged) as reason:
            return not_done(run, reason)
