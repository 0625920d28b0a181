"""A spread language model answers questions: the likeliest token after another, by the forward that it trains with.

Every layout can do that, and no rank needs the whole model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from phalanx.files import write_whole
from phalanx.folder_files import make_folder
from phalanx.parallel.communication.mesh import BATCH
from phalanx.questions import ModelAnswer, Question, Questions
from phalanx.run import Run
from phalanx.train.next_tokens import NextTokens
from phalanx.train.sites import agreed_weights

if TYPE_CHECKING:
    from phalanx.train.engine import Engine

MOST_TOKENS = 48
"""Of an answer."""
TOGETHER = 4
"""Questions that a rank answers at a time."""


def note_answers(engine: Engine, run: Run, on_token: Callable[[], None] = lambda: None) -> None:
    """At an evaluation of a run: a few answers, in a file of its folder. All ranks must call it."""
    questions = engine.task.questions()
    if questions is None or not questions.shown or not questions.every:
        return
    with engine.callbacks.evaluating(engine), agreed_weights(engine):
        found = answered(engine, questions, questions.shown, on_token=on_token)
    if engine.is_main:
        write_answers(answers_path(run, engine.step_number), found)


def rehearse_answers(engine: Engine) -> None:
    """Before the first step: a token of one answer, so that a mistake shows now. All ranks must call it."""
    questions = engine.task.questions()
    if questions is not None and questions.shown and questions.every:
        answered(engine, questions, 1, most=1)


def answers_path(run: Run, step: int, by: str = "") -> Path:
    """Those of an evaluation after so many steps; ``by``: a word for who made it, if not the run itself."""
    return run.path / "answers" / f"{by}step-{step:08d}.jsonl"


def write_answers(path: Path, answers: Sequence[ModelAnswer]) -> str:
    """One JSON object a line; where."""
    make_folder(path.parent.parent, path.parent)
    lines = [json.dumps(vars(each) | {"exact": each.exact}, ensure_ascii=False) for each in answers]
    write_whole(path, "\n".join(lines) + "\n", within=path.parent.parent)
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
    next_tokens = NextTokens(engine, questions, chosen)
    for begin in range(0, len(chosen), TOGETHER * size):
        asked = chosen[begin : begin + TOGETHER * size]
        own = asked[index::size] or asked[:1]  # who has none computes along, as sharded weights need
        said: dict[int, list[list[int]]] = {}
        next_tokens.begin()
        for _ in range(most):
            on_token()
            if not _say_more(next_tokens, asked, own, said):
                break
        for number, question in enumerate(asked):
            tokens = [token for token in said[number % size][number // size] if token not in questions.ends]
            answer = questions.decode(tokens)
            found.append(ModelAnswer(question.text, answer, question.reference, question.prompt))
    engine.spread.rest()
    model.train()
    return found


def _say_more(
    next_tokens: NextTokens, asked: list[Question], own: list[Question], said: dict[int, list[list[int]]]
) -> bool:
    """A token more of each answer, by rank of the batch; whether any goes on."""
    engine, questions = next_tokens.engine, next_tokens.questions
    size, index = engine.mesh.size(*BATCH), engine.mesh.index(*BATCH)
    spoken = said.get(index, [[] for _ in own])
    rows = [[*question.tokens, *answer] for question, answer in zip(own, spoken, strict=True)]
    words = [str(token) for token in next_tokens(rows)]
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
