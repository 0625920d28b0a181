"""Text where it lies: JSON lines and parquet."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from phalanx import WrongUse
from phalanx.data import JsonLines, Parquet

TEXTS = ["first", "zwei ü", "", 'with "quotes"\nand a line', "last"]


def test_json_lines_by_index(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text, "n": i}) for i, text in enumerate(TEXTS)) + "\n\n")
    documents = JsonLines(path)
    assert [documents[i] for i in range(len(documents))] == TEXTS
    assert documents[3] == TEXTS[3]


def test_json_lines_that_are_wrong_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n{"txt": "typo"}\n{not json\n')
    documents = JsonLines(path)
    with pytest.raises(WrongUse, match="object 2 has no field 'text'; did you mean 'txt'"):
        documents[1]
    with pytest.raises(WrongUse, match="object 3: not JSON"):
        documents[2]
    with pytest.raises(WrongUse, match="is not there"):
        JsonLines(tmp_path / "b.jsonl")


def test_parquet_by_index_over_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": TEXTS, "n": list(range(5))}), path, row_group_size=2)
    documents = Parquet(path)
    assert [documents[i] for i in (4, 0, 3, 1, 2)] == [TEXTS[i] for i in (4, 0, 3, 1, 2)]
    with pytest.raises(IndexError):
        documents[5]
    with pytest.raises(WrongUse, match="has no column 'txt'; did you mean 'text'"):
        Parquet(path, "txt")
