"""A spread language model's answers are those of the whole model, as transformers generates them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx
from phalanx import Layout
from phalanx.questions import ModelAnswer
from phalanx.recipes.distil import Distil
from phalanx.recipes.sft import SFT
from phalanx.run import Run
from phalanx.train.answering import answered, note_answers, rehearse_answers
from tests.ranks import Ranks

pytest.importorskip("transformers", reason="transformers is not installed (the dev extra has it)")

SETTINGS: dict[str, Any] = {
    "small": True, "length": 64, "global_batch": 4, "precision": "float64", "steps": 6, "learning_rate": 2e-2,
    "warmup_steps": 0,
}  # fmt: skip
COUNT, MOST = 5, 7


def said(layout: str) -> tuple[list[ModelAnswer], dict[str, torch.Tensor]]:
    with phalanx.Engine(SFT(**SETTINGS), Layout.parse(layout), device="cpu") as engine:
        for batch in engine.batches():
            engine.step(batch)
        questions = engine.task.questions()
        assert questions is not None
        return answered(engine, questions, COUNT, MOST), engine.whole_weights()


def test_answers_are_those_that_transformers_generates(ranks: Ranks) -> None:
    found, weights = said("dp=1")
    task = SFT(**SETTINGS)
    model = task.model().double().eval()
    model.load_state_dict(weights)
    questions = task.questions()
    assert questions is not None
    for answer, question in zip(found, questions.every, strict=False):
        prompt = torch.tensor([list(question.tokens)])
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=MOST)
        tokens = out[0, prompt.shape[1] :].tolist()
        ends = [place for place, token in enumerate(tokens) if token in questions.ends]
        assert answer.answer == questions.decode(tokens[: ends[0]] if ends else tokens)
        assert answer.reference == question.reference
    assert len({answer.answer for answer in found}) > 1 or found[0].answer
    for layout in ("dp=2,tp=2", "fsdp=2,pp=2"):
        assert all(answers == found for answers, _ in ranks(4, said, layout))


def test_a_few_are_written_into_the_runs_folder(tmp_path: Path) -> None:
    task = SFT(**SETTINGS | {"steps": 0, "answers": 2})
    with phalanx.Engine(task, device="cpu") as engine:
        rehearse_answers(engine)
        assert not (tmp_path / "answers").exists()
        note_answers(engine, Run(tmp_path))
        assert engine.model.training
    lines = (tmp_path / "answers" / "step-00000000.jsonl").read_text().splitlines()
    assert [set(json.loads(line)) for line in lines] == [{"question", "prompt", "answer", "reference", "exact"}] * 2
    task = SFT(**SETTINGS | {"answers": 0})
    with phalanx.Engine(task, device="cpu") as engine:
        note_answers(engine, Run(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def noted(folder: str, steps: int) -> None:
    task = SFT(**SETTINGS | {"answers": 2})
    with phalanx.Engine(task, "dp=2,comm=local:4", device="cpu") as engine:
        for _, batch in zip(range(steps), engine.batches(), strict=False):
            engine.step(batch)
        note_answers(engine, Run(Path(folder)))


def test_sites_answer_with_what_all_have_agreed_on(ranks: Ranks, tmp_path: Path) -> None:
    for steps in (0, 3, 4):
        ranks(2, noted, str(tmp_path), steps)
    first, between, agreed = ((tmp_path / "answers" / f"step-{n:08d}.jsonl").read_text() for n in (0, 3, 4))
    assert between == first
    assert agreed != first


def test_a_model_with_another_one_beside_it_answers_itself() -> None:
    with phalanx.Engine(Distil(**SETTINGS | {"steps": 0, "answers": 1}), device="cpu") as engine:
        rehearse_answers(engine)
        weights, questions = engine.whole_weights(), engine.task.questions()
        assert questions is not None
        (found,) = answered(engine, questions, 1, most=3)
    own = SFT(**SETTINGS).model().double().eval()
    own.load_state_dict({name: value for name, value in weights.items() if not name.startswith("teacher.")})
    tokens = list(questions.every[0].tokens)
    for _ in range(3):
        with torch.no_grad():
            tokens.append(int(own(torch.tensor([tokens])).logits[0, -1].argmax()))
    said = tokens[len(questions.every[0].tokens) :]
    assert found.answer == questions.decode([token for token in said if token not in questions.ends])
