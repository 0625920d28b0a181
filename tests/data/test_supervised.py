"""Samples of conversations: targets are answers, packed ones stay apart, bad rows are named or left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phalanx import WrongUse
from phalanx.data.chat import Chat
from phalanx.data.chat_tokenizer import trained
from phalanx.data.row_file import RowFile
from phalanx.data.supervised import Supervised, encoded, padded_together

pytest.importorskip("transformers", reason="transformers is not installed (the dev extra has it)")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return trained(["What is it?", "It is that."], 280)


def rows(folder: Path, *found: Any) -> RowFile:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in found))
    return RowFile(path)


GOOD = {"question": "What is it?", "answer": "It is that."}


def test_targets_are_the_next_tokens_of_answers() -> None:
    ids, counts = np.array([5, 6, 7, 8]), np.array([False, False, True, True])
    sample = Supervised([(ids, counts)])[0]
    assert sample["tokens"].tolist() == [5, 6, 7, 8]
    assert sample["targets"].tolist() == [-100, 7, 8, -100]


def test_packed_conversations_begin_anew() -> None:
    documents = [(np.arange(size) + 10 * size, np.ones(size, dtype=bool)) for size in (3, 2, 4)]
    samples = Supervised(documents, length=6, pad=9)
    assert len(samples) == 2
    first = samples[0]
    assert first["tokens"].tolist() == [20, 21, 40, 41, 42, 43]
    assert first["positions"].tolist() == [0, 1, 0, 1, 2, 3]
    assert first["documents"].tolist() == [0, 0, 1, 1, 1, 1]
    assert first["targets"].tolist() == [21, -100, 41, 42, 43, -100]
    second = samples[1]
    assert second["tokens"].tolist() == [30, 31, 32, 9, 9, 9]
    assert second["documents"].tolist() == [0, 0, 0, -1, -1, -1]
    assert second["targets"].tolist() == [31, 32, -100, -100, -100, -100]


def test_others_are_padded_to_the_longest() -> None:
    samples = Supervised([(np.arange(size), np.ones(size, dtype=bool)) for size in (3, 5)])
    batch = padded_together([samples[0], samples[1]], pad=7)
    assert batch["tokens"].tolist() == [[0, 1, 2, 7, 7], [0, 1, 2, 3, 4]]
    assert torch.equal(batch["targets"][0], torch.tensor([1, 2, -100, -100, -100]))


@pytest.mark.parametrize(("bad", "options", "words"), [
    ({"question": "What?"}, {}, r"rows.jsonl, row 2: it has question, but no answer\. .*, or set bad_rows=skip\.$"),
    ({"question": "What?", "answer": ""}, {}, r"rows.jsonl, row 2: it has no answer .* or set bad_rows=skip"),
    ([1], {}, r"rows.jsonl, row 2: a list, not an object .*, or set bad_rows=skip\.$"),
    ({"question": "What is " * 30, "answer": "It."}, {"length": 40}, r"row 2: there is no answer within length=40"),
    ({"question": "What?", "answer": "\u00e9"}, {"vocabulary": 170}, r"has the token \d+, and the model's vocabulary"),
])  # fmt: skip
def test_a_bad_row_is_named_or_left_out(
    tmp_path: Path, tokenizer: Any, bad: Any, options: dict[str, int], words: str
) -> None:
    given = {"length": 100, "vocabulary": 300} | options
    good = {"question": "?", "answer": "!"} if "vocabulary" in options else GOOD
    found = rows(tmp_path, good, bad, good)
    with pytest.raises(WrongUse, match=words):
        encoded(found, Chat(tokenizer), **given)
    kept = encoded(found, Chat(tokenizer), **given, bad_rows="skip")
    assert (len(kept.documents), kept.rows) == (2, 3)
    assert "rows.jsonl, row 2: " in kept.left_out
    assert "bad_rows" not in kept.left_out
    with pytest.raises(WrongUse, match="has no row to train on: row 1: "):
        encoded(rows(tmp_path, bad), Chat(tokenizer), **given, bad_rows="skip")


def test_rows_that_are_left_out_for_one_reason_are_named_together(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "rows.jsonl"
    bad = json.dumps({"question": "What?"})
    path.write_text("\n".join([json.dumps(GOOD), *[bad] * 4, "{broken"]))
    with pytest.raises(WrongUse, match=r"row 2: it has question, but no answer"):
        encoded(RowFile(path), Chat(tokenizer), 100, 300)
    found = encoded(RowFile(path), Chat(tokenizer), 100, 300, "skip").left_out
    assert found.startswith(f"{path}, rows 2, 3, 4 and 1 more: it has question, but no answer; row 6: not JSON (")
    path.write_text("{broken")
    with pytest.raises(WrongUse, match=r"row 1: not JSON \(.*\)\. Mend or remove it, or set bad_rows=skip\."):
        encoded(RowFile(path), Chat(tokenizer), 100, 300)


def test_long_rows_are_cut_and_it_is_counted(tmp_path: Path, tokenizer: Any) -> None:
    found = encoded(rows(tmp_path, GOOD | {"answer": "It is that. " * 20}), Chat(tokenizer), 24, 300)
    ((ids, counts),) = found.documents
    assert len(ids) == len(counts) == 24
    assert (found.cut, found.left_out) == (1, "")


def test_too_few_samples_after_packing_say_so_and_what_they_are() -> None:
    documents = [(np.arange(4), np.array([False, False, True, True]))] * 5
    samples = Supervised(documents, length=8)
    assert samples.describe() == "5 packed into 3 samples of 8, 10 of 20 tokens have a loss, the longest row has 4"
    assert samples.training_order(3, 0).size == 3
    with pytest.raises(WrongUse, match=r"5 rows packed into samples of length=8 tokens make 3, fewer than one batch of "
                       r"4\. Set a smaller length, packed=false, or global_batch=3\."):  # fmt: skip
        samples.training_order(4, 0)
    assert Supervised(documents).describe().startswith("5 a sample each, 10 of 20 tokens")
    with pytest.raises(WrongUse, match="5 samples, fewer than one batch of 6"):
        Supervised(documents).training_order(6, 0)
