"""A spread language model answers questions: the likeliest token after another, by the forward that it trains with.

Every layout can do that, and no rank needs the whole model; there is no cache of keys, so each token costs a forward.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from phalanx.data.loader import MicroBatch
from phalanx.files import write_whole
from phalanx.logits import Logits
from phalanx.parallel.communication.mesh import BATCH
from phalanx.questions import ModelAnswer, Question, Questions
from phalanx.run import Run
from phalanx.train.sites import agreed_weights
from phalanx.train.step import compute

if TYPE_CHECKING:
    from phalanx.train.engine import Engine

MOST_TOKENS = 48
"""Of an answer."""
TOGETHER = 4
"""Questions that a rank answers at a time."""
ROUND = 16
"""Lengths are padded to a multiple of this, so that there are few of them."""


def note_answers(engine: Engine, run: Run, on_token: Callable[[], None] = lambda: None) -> None:
    """At an evaluation of a run: a few answers, in a file of its folder. All ranks must call it."""
    questions = engine.task.questions()
    if questions is None or not questions.shown or not questions.every:
        return
    with engine.callbacks.evaluating(engine), agreed_weights(engine):
        found = answered(engine, questions, questions.shown, on_token=on_token)
    if engine.is_main:
        write_answers(run, f"step-{engine.step_number:08d}", found)


def rehearse_answers(engine: Engine) -> None:
    """Before the first step: a token of one answer, so that a mistake shows now. All ranks must call it."""
    questions = engine.task.questions()
    if questions is not None and questions.shown and questions.every:
        answered(engine, questions, 1, most=1)


def write_answers(run: Run, name: str, answers: Sequence[ModelAnswer]) -> str:
    """One JSON object a line; where."""
    path = run.path / "answers" / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    lines = [json.dumps(vars(each) | {"exact": each.exact}, ensure_ascii=False) for each in answers]
    write_whole(path, "\n".join(lines) + "\n")
    return str(path)


@torch.no_grad()
def answered(
    engine: Engine,
    questions: Questions,
    count: int,
    most: int = MOST_TOKENS,
    on_token: Callable[[], None] = lambda: None,
) -> list[ModelAnswer]:
    """The model's answers to the first questions, the same on every rank. All ranks must call it."""
    engine.spread.refresh()
    model = engine.spread.model
    model.eval()
    size, index = engine.mesh.size(*BATCH), engine.mesh.index(*BATCH)
    chosen, found = list(questions.every[:count]), list[ModelAnswer]()
    for begin in range(0, len(chosen), TOGETHER * size):
        asked = chosen[begin : begin + TOGETHER * size]
        own = asked[index::size] or asked[:1]  # who has none computes along, as sharded weights need
        said: dict[int, list[list[int]]] = {}
        for _ in range(most):
            on_token()
            if not _say_more(engine, questions, asked, own, said):
                break
        for number, question in enumerate(asked):
            tokens = [token for token in said[number % size][number // size] if token not in questions.ends]
            answer = questions.decode(tokens)
            found.append(ModelAnswer(question.text, answer, question.reference, question.prompt))
    engine.spread.rest()
    model.train()
    return found


def _say_more(
    engine: Engine, questions: Questions, asked: list[Question], own: list[Question], said: dict[int, list[list[int]]]
) -> bool:
    """A token more of each answer, by rank of the batch; whether any goes on."""
    size, index = engine.mesh.size(*BATCH), engine.mesh.index(*BATCH)
    spoken = said.get(index, [[] for _ in own])
    rows = [[*question.tokens, *answer] for question, answer in zip(own, spoken, strict=True)]
    words = [str(token) for token in _next(engine, questions, rows)]
    told: dict[int, list[int]] = {}
    for first, *spelled in engine.mesh.world.all_gather_words([str(index), *words]):
        if spelled:
            told.setdefault(int(first), [int(token) for token in spelled])
    going = False
    for each, tokens in told.items():
        answers = said.setdefault(each, [[] for _ in tokens])
        questioned = asked[each::size] or asked[:1]
        for answer, token, question in zip(answers, tokens, questioned, strict=True):
            if not (answer and answer[-1] in questions.ends) and len(question.tokens) + len(answer) < questions.length:
                answer.append(token)
                going = going or token not in questions.ends
    return going


def _next(engine: Engine, questions: Questions, rows: list[list[int]]) -> list[int]:
    """The likeliest token after each row; nothing where another stage of a pipeline knows it."""
    longest = min(-(-max(map(len, rows)) // ROUND) * ROUND, max(questions.length, max(map(len, rows))))
    tokens = torch.full((len(rows), longest), questions.pad)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row)
    places = torch.arange(longest).expand(len(rows), -1).contiguous()
    batch = {"tokens": tokens, "positions": places, "documents": torch.zeros_like(places)}
    ends = [len(row) - 1 for row in rows]

    def finish(output: Any, _: dict[str, Any]) -> list[int]:
        logits = output["logits"] if isinstance(output, Mapping) else getattr(output, "logits", output)
        whole: Tensor = logits.tensor() if isinstance(logits, Logits) else logits
        return [int(token) for token in whole[range(len(ends)), ends].argmax(-1)]

    micro, spread = MicroBatch(batch, np.arange(len(rows))), engine.spread
    actions = spread.forwards(1)
    spread.start([micro], actions)
    spread.samples.start(None, 1, None)
    found: list[int] = []
    for action in actions:
        result = compute(engine, engine.step_number, micro, action, finish)
        found = result if spread.gives_loss(action) else found
    return found
