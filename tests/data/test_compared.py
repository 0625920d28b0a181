"""Two sequences a sample, padded; and whose answer a mismatched one is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phalanx.data.compared import Compared, Judgements, stacked
from phalanx.data.preferences import AnsweredPrompt, Judged


def answer(prompt: list[int], said: list[int]) -> AnsweredPrompt:
    ids = np.array([*prompt, *said])
    return AnsweredPrompt(ids, np.arange(len(ids)) >= len(prompt), len(prompt), len(ids))


def test_both_answers_are_one_sample() -> None:
    data = Compared([(answer([1, 2], [3, 4]), answer([1, 2], [5])), (answer([6], [7]), answer([6], [8]))], pad=9)
    sample = data[0]
    assert sample["tokens"].tolist() == [[1, 2, 3, 4], [1, 2, 5, 9]]
    assert sample["targets"].tolist() == [[-100, 3, 4, -100], [-100, 5, -100, -100]]
    batch = stacked([data[0], data[1]], pad=9)
    assert batch["tokens"].shape == (2, 2, 4)
    assert batch["tokens"][1].tolist() == [[6, 7, 9, 9], [6, 8, 9, 9]]
    assert data.describe() == "2 pairs, the longest answer with its prompt has 4 tokens"
    with pytest.raises(IndexError):
        _ = data[2]


def test_a_mismatched_answer_is_of_another_prompt() -> None:
    rows = [([1], [2]), ([1], [3]), ([4, 4], [5, 6]), ([7], [8])]
    data = Judgements([Judged(answer(*row), good=number % 2 == 0) for number, row in enumerate(rows)], length=3)
    assert [data.mismatched(index) for index in range(4)] == [3, 3, 1, 2]
    assert data[1]["tokens"].tolist() == [[1, 3], [1, 8]]
    assert data[3]["tokens"].tolist() == [[7, 8, 0], [7, 5, 6]]
    assert data[2]["tokens"].shape == (2, 4)
    assert [float(data[index]["good"]) for index in range(4)] == [1.0, 0.0, 1.0, 0.0]
    batch = stacked([data[0], data[3]], pad=0)
    assert torch.equal(batch["good"], torch.tensor([1.0, 0.0]))
    assert data.describe() == "2 good and 2 bad, the longest answer with its prompt has 4 tokens"


def test_where_all_have_one_prompt_an_answer_is_its_own() -> None:
    data = Judgements([Judged(answer([1], [2]), True), Judged(answer([1], [3]), False)], length=3)
    assert data.mismatched(0) == 0
