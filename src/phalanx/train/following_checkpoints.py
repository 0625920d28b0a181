"""Checkpoints evaluated as they are committed, beside a run that trains and is not held up by it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from phalanx.errors import CannotHere, WrongUse
from phalanx.events import say
from phalanx.run import holder
from phalanx.train.evaluating import Evaluation, EvaluationFailed, Evaluator

LOOK_SECONDS = 0.5
NICE = 5
"""Processors are the training's first."""


def follow(evaluator: Evaluator, assignments: Sequence[str] = ()) -> list[Evaluation]:
    """Evaluate the newest checkpoint whenever there is a newer one, until nobody trains the run any more.

    Where checkpoints come faster than they are evaluated, some are left out.
    """
    os.nice(NICE)
    found: list[Evaluation] = []
    done = -1
    while True:
        over = not holder(evaluator.run.path)  # before the look at checkpoints: the last one is seen
        newest = max(evaluator.manager.steps(), default=-1)
        if newest > done:
            done = newest
            one = _evaluated(evaluator, newest, assignments)
            found += [] if one is None else [one]
        elif over:
            return found
        else:
            time.sleep(LOOK_SECONDS)


def _evaluated(evaluator: Evaluator, step: int, assignments: Sequence[str]) -> Evaluation | None:
    """A checkpoint that is gone before it was read is left for the next; one that cannot be evaluated ends it."""
    try:
        found = evaluator.evaluate(step)
    except (WrongUse, CannotHere, EvaluationFailed) as error:
        if step in evaluator.manager.steps():
            raise CannotHere(f"the evaluation beside training has ended, and the run goes on: {error}") from None
        say(f"evaluation beside training: the checkpoint of step {step} is gone before it was read")
        return None
    evaluator.note(found, assignments)
    said = "  ".join(f"{name} {value:.4f}" for name, value in found.measures.items())
    say(f"evaluated after step {step}: {said}")
    return found
