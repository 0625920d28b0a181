"""Rows to learn search from: what they may be called, what is wrong with them, and how they become a batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx import WrongUse
from phalanx.data.row_file import RowFile
from phalanx.data.search_rows import ABSENT, SearchRows, Texts, padded_together, read, texts_of


def written(folder: Path, *rows: Any) -> RowFile:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return RowFile(path)


def lengths_as_tokens(texts: list[str]) -> list[list[int]]:
    return [[len(word) for word in text.split()] for text in texts]


@pytest.mark.parametrize("row", [
    {"query": "a", "positive": "b", "negatives": ["c", "d"]},
    {"anchor": "a", "positive": "b", "negative_1": "c", "negative_2": "d"},
    {"question": "a", "answer": "b", "negative": "c", "negatives": ["d", None, ""], "other": 3},
])  # fmt: skip
def test_columns_have_the_names_that_people_use(row: dict[str, Any]) -> None:
    assert texts_of(row) == Texts("a", "b", ("c", "d"))


@pytest.mark.parametrize(("row", "words"), [
    ({"query": "a"}, "row 2: it has no positive"),
    ({"positive": "a"}, "row 2: it has no query"),
    ({"query": "a", "positive": " "}, "row 2: its positive is empty"),
    ({"query": "a", "positive": 3}, "row 2: its positive is a int, not a text"),
    ({"query": "a", "positive": "b", "negatives": [["c"]]}, "row 2: its negatives is a list, not a text"),
    ({"query": "a", "question": "a", "positive": "b"}, "row 2: it has query and question, of which one is meant"),
    ("{", "row 2: not JSON"),
])  # fmt: skip
def test_a_bad_row_is_named_and_may_be_left_out(row: Any, words: str, tmp_path: Path) -> None:
    file = written(tmp_path, {"query": "a", "positive": "b"}, row)
    with pytest.raises(WrongUse, match=words) as error:
        read(file)
    assert str(error.value).endswith("Mend or remove it, or set bad_rows=skip.")
    found = read(file, "skip")
    assert (len(found.rows), found.size) == (1, 2)
    assert words in found.left_out


def test_nothing_but_bad_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match=r"no row to train on: rows 1, 2: it has no query"):
        read(written(tmp_path, {"positive": "b"}, {"positive": "c"}), "skip")


def test_samples_have_all_texts_and_equal_ones_have_equal_ids() -> None:
    rows = [Texts("a bb", "ccc", ("a bb", "d", "e")), Texts("f", "ccc", ())]
    data = SearchRows(rows, lengths_as_tokens, negatives=2, prompts=("", ""))
    batch = padded_together([data[0], data[1]], pad=9)
    assert batch["ids"].tolist() == [[0, 1, 0, 2], [3, 1, ABSENT, ABSENT]]
    assert batch["lengths"].tolist() == [[2, 1, 2, 1], [1, 1, 1, 1]]
    assert batch["tokens"][0].tolist() == [[1, 2], [3, 9], [1, 2], [1, 9]]
    assert batch["tokens"][1, 2].tolist() == [9, 9]
    assert (data.texts, data.longest, data.largest) == (4, 2, 3)


def test_prompts_stand_before_queries_and_texts() -> None:
    data = SearchRows([Texts("a", "a", ())], lengths_as_tokens, negatives=2, prompts=("query: ", "the text: "))
    assert [tokens.tolist() for tokens in data[0]["tokens"]] == [[6, 1], [3, 5, 1]]
    assert torch.equal(data[0]["ids"], torch.tensor([0, 1]))
