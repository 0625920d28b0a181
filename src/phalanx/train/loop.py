"""The loop: from the newest state, steps until the task is done, each one noted in the run's folder."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from phalanx.checkpoint.best import Best
from phalanx.checkpoint.weights import write_weights
from phalanx.data.loader import StepBatch
from phalanx.errors import CannotHere
from phalanx.events import EventLog
from phalanx.files import no_room, pauses
from phalanx.launch.heartbeats import STEPS, RankHeartbeat
from phalanx.launch.stopping import give_requests
from phalanx.run import Run
from phalanx.train.answering import note_answers, rehearse_answers
from phalanx.train.bad_samples import note_bad_samples
from phalanx.train.checkpoint_weights import load_weights
from phalanx.train.checkpointing import FULL_ATTEMPTS, Checkpointer
from phalanx.train.collecting import CannotSummarise
from phalanx.train.comm_work import exact_bytes
from phalanx.train.engine import Engine
from phalanx.train.guard import BadNumbers
from phalanx.train.not_finite import TIMES, located
from phalanx.train.recording import StepRecording
from phalanx.train.replay import replay
from phalanx.train.replicas import Corrupted, comparable, compare, is_compared
from phalanx.train.restoring import Restorer, done_again
from phalanx.train.sites import SitesRound
from phalanx.train.step import Metrics
from phalanx.train.summary import Summary
from phalanx.train.utilisation import Utilisation


class BadDevice(CannotHere):
    """A device that computes wrongly. A finding: starting again would not help."""

    exit_code = 1


REPLAYED = 8
"""So many micro-batches are computed by all ranks to find a bad device: one alone may not touch what is wrong."""
SHOWN_SAMPLES = 1024
"""So many ids of a bad step's samples are noted."""


@dataclass
class Listener:
    """Who is told how it goes."""

    step: Callable[[Metrics], None] = lambda metrics: None
    evaluation: Callable[[int, dict[str, float]], None] = lambda step, measures: None
    resumed: Callable[[str, int], None] = lambda source, step: None
    said: Callable[[str], None] = lambda line: None


@dataclass
class Loop:
    """Steps, and what is due between them."""

    engine: Engine
    run: Run
    log: EventLog
    checkpointer: Checkpointer
    restorer: Restorer
    heartbeat: RankHeartbeat
    listener: Listener
    compare_steps: int = 0
    """Ranks that hold the same compare it every so many steps; 0: never."""
    drill: tuple[int, int] | None = None
    """A rank that is killed after a step, to see that the run survives it."""
    stopping: bool = False
    """Only what memory holds is to be saved."""
    utilisation: Utilisation | None = None
    """Told of every step, on the rank that says how much of its device is used."""
    looked_into: int = 0
    """Bad steps so far of which it was found out where they came from."""

    def train(self) -> Summary:
        """Train to the task's last step, evaluate, and leave the weights in the run's folder."""
        engine, task = self.engine, self.engine.task
        self.summary = Summary()
        self.checkpointer.may_take_long = partial(self.heartbeat.may_take_long, for_ever=True)
        give_requests(engine.signals)
        fresh = not self._resume()
        self.recording = StepRecording(engine, self.log, self.utilisation)
        engine.callbacks.call("on_start", engine)
        engine.callbacks.state()  # for what cannot be saved to show now
        if self.stopping and not fresh and engine.step_number < task.steps:
            self.checkpointer.before_step()
            self.checkpointer.save_now()
            self.summary.stopped = True
        elif engine.held_out is not None and fresh:
            self._rehearse()
        elif not fresh and engine.ended is None:
            self._evaluate_again()
        while engine.step_number < task.steps and not self.summary.stopped and engine.ended is None:
            for batch in self._batches():
                if not self._step(batch):
                    break
        self.summary.steps, self.summary.ended = engine.step_number, engine.ended
        engine.traffic.doing("ending")
        if not self.summary.stopped:
            self.heartbeat.may_take_long(for_ever=True)
            self.checkpointer.save_now()
            best = engine.callbacks.keeps_best is not None  # then the weights are left when all is evaluated
            if not best:
                self._leave_weights()
            if engine.held_out is not None and task.steps:
                self._evaluate()
            if best:
                self._take_up_best()
                self._leave_weights()
            engine.callbacks.call("on_end", engine)
        self.log.write(
            "stopped" if self.summary.stopped else "end", steps=self.summary.steps, held_out=self.summary.held_out,
            ended=engine.ended and engine.ended.why, best=self.summary.best and asdict(self.summary.best),
        )  # fmt: skip
        return self.summary

    def _keep_if_best(self) -> None:
        """After an evaluation: save the state where it is the best so far."""
        engine, watcher = self.engine, self.engine.callbacks.keeps_best
        if watcher is not None and watcher.best is not None and watcher.step == engine.step_number:
            self.heartbeat.may_take_long(for_ever=True)
            engine.traffic.doing("checkpoint")
            self.checkpointer.keep_best(Best(watcher.step, watcher.measure, watcher.best))

    def _take_up_best(self) -> None:
        """End with the weights of the best checkpoint."""
        engine, manager, step = self.engine, self.checkpointer.manager, self.engine.step_number
        self.checkpointer.settled()
        self.summary.best = best = self._noted_best()
        if best is None:
            self.listener.said("   note  no checkpoint was kept as the best: the last step's weights are left")
            return
        watcher = engine.callbacks.keeps_best
        if watcher is not None and watcher.best is not None and watcher.step != best.step:
            self.listener.said(
                f"   note  step {watcher.step} was the best, with a {watcher.measure} of {watcher.best:.6g}, and could "
                f"not be saved: of those that are kept it is {best}"
            )
        if best.step != step:
            load_weights(engine, manager, best.step)
            self.listener.said(f"   best  {best}: its weights are left in {self.run.weights_path.parent}")

    def _noted_best(self) -> Best | None:
        """The best checkpoint, as rank 0 sees it; all ranks must ask."""
        found = self.checkpointer.manager.best() if self.engine.environment.rank == 0 else None
        words = self.engine.mesh.world.broadcast_words([json.dumps(asdict(found))] if found else [], 0)
        return Best(**json.loads(words[0])) if words else None

    def _leave_weights(self) -> None:
        """The weights in the run's folder, and what callbacks keep beside them."""
        path = self.run.weights_path
        self._leave(path)
        for label, tensors in self.engine.callbacks.tensors().items():
            self._leave(path.with_name(f"{label.lower()}.safetensors"), tensors)

    def _leave(self, path: Path, values: Mapping[str, Tensor] | None = None) -> None:
        """Write the weights, or ``values`` in their place; a full disk is waited for."""
        engine = self.engine
        reason: list[str] = []
        for attempt, pause in enumerate(islice(pauses(), FULL_ATTEMPTS)):
            own: list[str] = []
            try:
                write_weights(engine.spread, path, engine.environment.rank == 0, values)
            except OSError as error:
                own = [str(error.strerror or error), *(["no room"] if no_room(error) else [])]
            reason = engine.mesh.world.broadcast_words(own, 0)
            if "no room" not in reason:
                break
            if not attempt:
                self.listener.said(f"   note  {path} cannot be written: {reason[0]}; waiting for room")
            time.sleep(pause)
        if reason:
            raise CannotHere(f"{path} cannot be written: {reason[0]}. Mend that and go on with --resume.")

    def _batches(self) -> Iterator[StepBatch]:
        batches = self.engine.batches()
        while True:
            self.engine.traffic.begins(self.engine.step_number)
            with self.heartbeat.fetching(), self.engine.clock.beside("data"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _resume(self) -> bool:
        """Take up the newest state; whether there is one."""
        engine = self.engine
        source = self.restorer.restore()
        reached = self.run.last_step() if engine.environment.rank == 0 else None
        self.log.write(
            "start", rank=engine.environment.rank, world=engine.environment.world, device=str(engine.device),
            layout=str(engine.layout), step=engine.step_number, source=source, generation=self.checkpointer.generation,
            data=engine.order.size, seed=engine.task.seed, global_batch=engine.task.global_batch,
            changes=engine.changes, other_samples=engine.other_samples, order=engine.order.facts(),
            exact_bytes=exact_bytes(engine),
        )  # fmt: skip
        if source is not None:
            self.listener.resumed(source, engine.step_number)
            engine.guard.leave_out(self._left_out())
            self.heartbeat.row[STEPS] = engine.step_number
        if reached is not None and (why := done_again(engine.step_number, reached["step"] + 1)):
            self.listener.said(why)
        if engine.layout.exact and self._was_corrupted():
            self._find_bad_device()
        if source is not None and (watcher := engine.callbacks.keeps_best) is not None and watcher.step is not None:
            best = self._noted_best()
            if best is None or best.step != watcher.step:
                watcher.forget()  # it was not saved, or is not there any more
        return source is not None

    def _left_out(self) -> list[int]:
        """Steps that a rollback has left out since the state that was taken up: they stay so."""
        found = [event["left_out"] for event in self._noted("rollback")]
        words = [str(step) for step in (found[-1] if found else ()) if step >= self.engine.step_number]
        return [int(step) for step in self.engine.mesh.world.broadcast_words(words, 0)]

    def _was_corrupted(self) -> bool:
        """Whether ranks disagreed, and no step has been done since."""
        kinds = [event["kind"] for event in self._noted("corrupted", "step")]
        return self.engine.mesh.world.broadcast_words(kinds[-1:], 0) == ["corrupted"]

    def _noted(self, *kinds: str) -> Iterator[dict[str, Any]]:
        """What the run's events say, to rank 0, which tells the others."""
        self.log.settle()
        return self.run.events(0, *kinds) if self.engine.environment.rank == 0 else iter(())

    def _find_bad_device(self) -> None:
        """All ranks have the same weights again: whoever computes other bits from them is not to be trusted."""
        first = self.engine.step_number
        wrong: list[int] = []
        for step in range(first, first + REPLAYED):
            wrong = wrong or replay(self.engine, step)
        self.log.write("replay", step=first, ranks=wrong)
        if wrong:
            named = ", ".join(map(str, wrong))
            raise BadDevice(
                f"rank {named} computes other bits than most from the same weights and samples: its device is bad, and "
                "corrupted the run before. Take it out and go on with --resume."
            )
        self.listener.said(" replay  all ranks compute the same bits from the same weights: the fault has passed")

    def _step(self, batch: StepBatch) -> bool:
        """One step and what comes after it; False if the next batch is not the one that follows."""
        engine, task = self.engine, self.engine.task
        if batch.step in engine.guard.left_out:
            last_round = engine.pass_over(batch)
            self.log.write("left out", step=batch.step, samples=batch.samples, slots=batch.slots, skipped=True)
            self.recording.note_round(last_round)
            return True
        store = self.checkpointer.manager.store.url
        with self.recording.checkpointing(store):
            self.checkpointer.before_step()
        note_bad_samples(engine, engine.loader, batch, self.log.write)
        metrics = engine.step(batch)
        self.recording.note(metrics)
        engine.auto_comm.tell(self.log.write, self.listener.said)
        self.heartbeat.stepped(engine.step_number)
        if self.drill == (engine.environment.rank, engine.step_number):
            os.kill(os.getpid(), signal.SIGKILL)
        self.listener.step(metrics)
        if metrics.bad:
            self._note_bad(batch, metrics)
        if not engine.just_agreed:
            return True  # what is to be done is decided where all ranks know the same
        told = metrics.round or metrics
        try:
            engine.guard.note(told.loss, told.bad, told.step)
        except BadNumbers:
            if metrics.round is None:
                engine.undo_count(metrics)  # so that whoever goes on begins with this step
            with suppress(BadNumbers):  # or from an earlier one, where the weights are bad themselves
                self.checkpointer.save_now()
            raise
        if told.bad and self._undone(told):
            return False
        if told.signals.finish and engine.step_number < task.steps:
            ended = engine.agree_to_end()
            self.listener.said(f"    end  after step {ended.step} of {ended.of}: {ended.why}")
        last = engine.step_number == task.steps or engine.ended is not None
        if self.compare_steps and (last or any(is_compared(n, self.compare_steps) for n in engine.just_agreed)):
            self.heartbeat.may_take_long()
            engine.traffic.doing("comparing replicas")
            self._compare()
        if last or told.signals.stop:
            self.heartbeat.may_take_long(for_ever=True)
        engine.traffic.doing("checkpoint")
        with self.recording.checkpointing(store, last):
            self.checkpointer.after_step(told.signals, last)
        if told.signals.stop and not last:
            self.summary.stopped = True
            return False
        if engine.ended is not None:
            return False
        self._evaluate_if_due()
        return True

    def _note_bad(self, batch: StepBatch, metrics: Metrics) -> None:
        """With its samples, and where it came from if it is not finite."""
        engine, found = self.engine, dict[str, Any]()
        if not (math.isfinite(metrics.loss) and math.isfinite(metrics.grad_norm)) and self.looked_into < TIMES:
            self.looked_into += 1
            self.heartbeat.may_take_long()
            found = located(engine, batch)
        ids = engine.order.ids(metrics.step)[:SHOWN_SAMPLES].tolist()
        self.log.write(
            "bad", step=metrics.step, reason=metrics.bad, action=engine.guard.action, sample_ids=ids, **found
        )

    def _evaluate_again(self) -> None:
        """After a resume: the state was saved before callbacks saw the evaluation of its step."""
        if self.engine.callbacks.watches_evaluations:
            self._evaluate_if_due()

    def _evaluate_if_due(self) -> None:
        """Between two steps; after the last one it is done anyway."""
        engine, every = self.engine, self.engine.task.evaluate_every
        due = every and any(n % every == 0 for n in engine.just_agreed) and engine.step_number < engine.task.steps
        if due and engine.held_out is not None:
            self._evaluate()

    def _rehearse(self) -> None:
        """Evaluate a little, so that a mistake there shows now and not after the last step."""
        try:
            self.engine.callbacks.call("on_rehearsal", self.engine, self.engine.evaluate(batches=1))
            rehearse_answers(self.engine)
        except CannotSummarise as failure:  # one batch may have too few samples for it
            self.listener.said(
                f"   note  with the first {self.engine.task.global_batch} held-out samples alone, {failure}"
            )

    def _evaluate(self) -> None:
        self.heartbeat.may_take_long()
        self.engine.traffic.doing("evaluation")
        self.summary.held_out = self.engine.evaluate(on_batch=self.heartbeat.may_take_long)
        self.summary.held_out_with = self.engine.callbacks.evaluating_with(self.engine)
        step = self.engine.step_number - 1
        self.log.write("evaluation", step=step, held_out=self.summary.held_out)
        self.listener.evaluation(step, self.summary.held_out)
        note_answers(self.engine, self.run, self.heartbeat.may_take_long)
        self._keep_if_best()

    def _undone(self, metrics: Metrics | SitesRound) -> bool:
        """A bad step: noted with its samples; rolled back where that is the policy, and there is a state to go to."""
        engine, step = self.engine, metrics.step
        told = f"step {step + 1}: {metrics.bad}"
        if engine.guard.action != "rollback":
            self.listener.said(f"{told}; its update was left out")
            return False
        self.heartbeat.may_take_long()
        self.checkpointer.settled()
        bad_in_a_row = engine.guard.bad_in_a_row
        if self.restorer.restore() is None:
            self.listener.said(f"{told}; nothing is kept yet to go back to, so its update was left out")
            return False
        engine.guard.bad_in_a_row = bad_in_a_row  # or a run that only ever goes back would never end
        engine.guard.leave_out(range(engine.step_number, step + 1))
        self.log.write("rollback", step=engine.step_number, left_out=sorted(engine.guard.left_out))
        self.listener.said(f"{told}; back to step {engine.step_number}, and its data up to the bad step is left out")
        self._evaluate_again()
        return True

    def _compare(self) -> None:
        """Ranks that hold the same look whether they do; if not, what was kept since they last did is not trusted."""
        engine = self.engine
        if not comparable(engine):
            return
        try:
            compare(engine)
        except Corrupted as corruption:
            self.log.write("corrupted", step=engine.step_number, ranks=corruption.ranks, reason=str(corruption))
            self.checkpointer.distrust(after=engine.compared)
            raise
        engine.compared = engine.step_number
