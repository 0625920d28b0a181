"""The loop: steps until the task is done, each one noted in the run's folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from phalanx.checkpoint.weights import write_weights
from phalanx.run import EventLog, Run
from phalanx.train.engine import Engine
from phalanx.train.step import Metrics

OnStep = Callable[[Metrics], None]
OnEvaluation = Callable[[int, dict[str, float]], None]


@dataclass
class Summary:
    """What a finished run did."""

    steps: int = 0
    losses: list[float] = field(default_factory=list)
    skipped: int = 0
    held_out: dict[str, float] = field(default_factory=dict)


def train(
    engine: Engine, run: Run, on_step: OnStep | None = None, on_evaluation: OnEvaluation | None = None
) -> Summary:
    """Train to the task's last step, evaluate, and leave the weights in the run's folder."""
    task, rank = engine.task, engine.environment.rank
    summary = Summary()
    with EventLog(run, rank) as log:
        log.write(
            "start", rank=rank, world=engine.environment.world, device=str(engine.device), layout=str(engine.layout)
        )
        if engine.held_out is not None:
            engine.evaluate(batches=1)  # so that a mistake there shows now and not after the last step
        for batch in engine.batches():
            metrics = engine.step(batch)
            log.write("step", **asdict(metrics))
            summary.losses.append(metrics.loss)
            summary.skipped += metrics.skipped
            if on_step:
                on_step(metrics)
            last = engine.step_number == task.steps
            due = task.evaluate_every and engine.step_number % task.evaluate_every == 0
            if last:
                write_weights(engine.spread, run.weights_path, writer=rank == 0)
            if (last or due) and engine.held_out is not None:
                summary.held_out = engine.evaluate()
                log.write("evaluation", step=metrics.step, held_out=summary.held_out)
                if on_evaluation:
                    on_evaluation(metrics.step, summary.held_out)
        if not task.steps:
            write_weights(engine.spread, run.weights_path, writer=rank == 0)
        summary.steps = engine.step_number
        log.write(
            "end", steps=summary.steps, loss=summary.losses[-1] if summary.losses else None, held_out=summary.held_out
        )
    return summary
