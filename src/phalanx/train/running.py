"""A job run to a verdict: in its folder, under a supervisor, with other hosts if there are any."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from phalanx import user_code
from phalanx.checkpoint.manager import CheckpointManager
from phalanx.checkpoint.manifest import Damaged
from phalanx.checkpoint.slot import new_memory
from phalanx.checkpoint.store import Folder, open_store
from phalanx.checkpoint.verify import final_differs
from phalanx.errors import CannotHere, WrongUse
from phalanx.events import plain
from phalanx.files import content, exists, put_back
from phalanx.launch.ground import versions
from phalanx.launch.key import Key
from phalanx.launch.place import taken_back
from phalanx.launch.rendezvous import Rendezvous
from phalanx.launch.shared import Shared
from phalanx.launch.supervisor import Host, Supervisor
from phalanx.parallel.communication.compiled_notes import fastest
from phalanx.proofs import said
from phalanx.redact import learn, learn_task
from phalanx.run import Run, short_name
from phalanx.settings import plain_settings
from phalanx.train.certificate import NotDone, certified
from phalanx.train.choosing import full_reference
from phalanx.train.ending import conclude, not_done
from phalanx.train.evaluated_beside import EvaluatedBeside
from phalanx.train.folders import check_there, held_store
from phalanx.train.job import Job
from phalanx.train.placing import hosts_used
from phalanx.train.profile.telling import tell_profile
from phalanx.train.rank import Rank
from phalanx.train.summary import Summary
from phalanx.verdict import Verdict

LINGER_SECONDS = 1.0
"""How long the ranks of a supervisor that was killed may take to end, and hold its run until then."""


def train(
    job: Job, path: Path | None, resume: bool = False, begun: Callable[[Run], object] = lambda run: None
) -> Verdict:
    """Run it to the end, in a new folder, or in that of a run that did not come to its own; ``begun`` is told which."""
    learn_task(job.task)
    learn(asdict(job.options))
    job.cluster.check_room()
    if (profiled := job.options.profiled()) is not None:
        profiled.check_device(job.cluster.device)
    job.task.prepare()
    name = short_name(job.reference)
    if job.options.meet is not None:
        if path is None:
            raise WrongUse("several hosts need one folder that all of them see. Give it with --run.")
        return _Running.at(job, Run.folder(path, name), resume=True).or_put_back()  # the first host will hold it
    new = path is None or not exists(path)
    running = _Running.at(job, Run.folder(path, name) if resume else Run.create(path, name), resume)
    run, manager, beside = running.run, running.manager, running.beside
    run.check_links()
    begun(run)
    try:
        with run.held(LINGER_SECONDS), held_store(manager.store):
            if resume:
                taken_back(run)
            else:
                run.check_free()  # somebody may have been faster
            verdict = running.or_put_back()
            if new and verdict.exit_code in (2, 3) and not run.ledger() and not manager.steps():
                shutil.rmtree(run.path)  # it did nothing, and its name should be free for the next try
        beside.finish(verdict)
    finally:
        beside.end()
    return verdict


@dataclass(frozen=True)
class _Running:
    """A job in the folder of its run."""

    job: Job
    run: Run
    manager: CheckpointManager
    resume: bool
    beside: EvaluatedBeside

    @classmethod
    def at(cls, job: Job, run: Run, resume: bool) -> _Running:
        manager = CheckpointManager(open_store(job.options.checkpoints or run.checkpoints_path))
        check_there(run, manager)
        beside = EvaluatedBeside(job.options.evaluate_on, run, job.options.quiet)
        return cls(job, run, manager, resume, beside)

    def or_put_back(self) -> Verdict:
        """What was refused before a step is not what the run is: its settings and certificate stay as they were."""
        last = self.run.last_step()
        before = {path: content(path) for path in (self.run.settings_path, self.run.certificate_path)}
        if self.job.options.meet is not None:
            before.clear()  # they are the first host's, which may have gone on since
        try:
            verdict = self._train()
        except (WrongUse, CannotHere):
            self._put_back(before, last)
            raise
        if verdict.exit_code in (2, 3):
            self._put_back(before, last)
        return verdict

    def _put_back(self, before: Mapping[Path, tuple[bytes, int] | None], last: dict[str, Any] | None) -> None:
        """Unless a step was noted after the ``last``."""
        if self.run.last_step() == last:
            put_back(before)

    def _train(self) -> Verdict:
        finished = self._finished()
        if finished is not None:
            return finished
        user_code.remember()  # now, before it is edited: ranks are forked from this process
        fastest()  # compiled here, if it has to be: once for all ranks
        self.run.certificate_path.unlink(missing_ok=True)  # of a shorter run, which goes on now
        job = self.job
        where = self.run.proof_folders(Path.cwd())
        proven = said(job.task, plain_settings(job.task), job.layout, where, job.reference)
        if proven and not job.options.quiet:
            print(f"  proof  {proven}", flush=True)
        if job.options.meet is None or not self.run.settings_path.exists():
            self.run.write_settings({"run": self._words(), "settings": plain_settings(job.task)})
        self.beside.start()
        supervisor = self._supervisor()
        with supervisor.heeding():
            return self._supervised(supervisor)

    def _finished(self) -> Verdict | None:
        """The verdict on a run that is done already; a place that holds other steps than are asked for is refused."""
        run, manager, steps = self.run, self.manager, self.job.task.steps
        saved = max(manager.steps(), default=0)
        if saved and not self.resume:
            raise WrongUse(
                f"{manager.store.url} holds checkpoints already, up to step {saved}. Go on from them with --resume, or "
                "give another folder with --checkpoints."
            )
        done = run.certified_plan()
        if self.resume and done is not None and done >= steps and not self._final_differs():
            if done > steps:
                at = run.certified_steps()
                early = f" of {done} that were planned" if at != done else ""
                raise WrongUse(
                    f"{run.path} is finished at step {at}{early}. Give --steps {done + 1} or more to go on, or leave "
                    "them out."
                )
            try:
                return Verdict(True, f"{run.path} is finished", [f"weights: {run.weights_path}", self._certified()])
            except (NotDone, Damaged) as reason:
                return not_done(run, reason)
        if self.resume and saved > steps:
            raise WrongUse(f"{run.path} is at step {saved} already. Give --steps {saved + 1} or more, or leave it out.")
        return None

    def _final_differs(self) -> bool:
        """Whether the weights of a run that was finished are not there any more as they were."""
        try:
            manifest = self.manager.open(self.run.final_step() or 0).manifest
            return bool(final_differs(self.run.weights_path, manifest))
        except (Damaged, OSError):
            return True

    def _words(self) -> dict[str, Any]:
        """What a ``run.toml`` says of the run beside its task's settings."""
        return {
            "task": full_reference(self.job.reference),
            "folder": str(Path.cwd()),
            "layout": str(self.job.layout),
            "on": f"local:{self.job.cluster.world}",
            "device": self.job.cluster.device,
            **self.job.options.to_repeat(),
        }

    def _supervisor(self) -> Supervisor:
        job, manager, options = self.job, self.manager, self.job.options
        rendezvous = None if options.meet is None else self._meeting(options.meet)
        shared = None if rendezvous is None else Shared(rendezvous, Folder(self.run.path), manager.store)
        return Supervisor(
            self.run, job.cluster.world, new_memory, options.restarts, options.grace, rendezvous,
            partial(hosts_used, job.layout, job.task.global_batch), shared, self._certified,
            manager.generation, lambda: max(manager.steps(), default=0), options.drill(),
        )  # fmt: skip

    def _meeting(self, address: str) -> Rendezvous:
        """Where this host's supervisor meets those of the others."""
        options, path = self.job.options, self.run.path
        code = user_code.joined(user_code.snapshot(user_code.home(type(self.job.task))))
        terms = plain({"layout": str(self.job.layout), **plain_settings(self.job.task), **versions(code)})
        return Rendezvous(
            address, key=Key.of_run(path), name=str(path.resolve()), ranks=self.job.cluster.world,
            min_nodes=options.min_nodes, max_nodes=options.max_nodes, host=options.host or "", patience=options.timeout,
            interface=options.interface, terms={**options.to_repeat(), "profile": options.profile or "none", **terms},
        )  # fmt: skip

    def _supervised(self, supervisor: Supervisor) -> Verdict:
        try:
            outcome = supervisor.supervise(self._rank)
        except (NotDone, Damaged) as reason:
            return not_done(self.run, reason)
        finally:
            if supervisor.rendezvous is not None:
                supervisor.rendezvous.close()
        if supervisor.leads or (supervisor.shared is not None and supervisor.shared.private):
            tell_profile(self.job.options, self.run, supervisor.done())
        return conclude(supervisor, outcome, self.job.task, self.run, self.manager)

    def _rank(self, host: Host) -> Summary:
        return Rank(self.job, self.run, self.manager, self.resume, host).train()

    def _certified(self) -> str:
        return certified(self.run, self.job.task, self.manager)
