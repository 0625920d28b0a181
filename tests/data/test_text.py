"""Text where it lies: JSON lines and parquet."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from phalanx import WrongUse
from phalanx.data import JsonLines, Parquet, split
from phalanx.data.columns import column_of
from phalanx.data.loader import Loader
from phalanx.data.order import Order
from phalanx.data.splitting import by_rows
from phalanx.task import Task
from tests.damage import DEEP

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
    path.write_text(f"{DEEP}\n")
    with pytest.raises(WrongUse, match="object 1: not JSON"):
        JsonLines(path)[0]
    with pytest.raises(WrongUse, match="is not there"):
        JsonLines(tmp_path / "b.jsonl")


def test_parquet_by_index_over_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": TEXTS, "n": list(range(5))}), path, row_group_size=2)
    documents = Parquet(path)
    assert [documents[i] for i in (4, 0, 3, 1, 2)] == [TEXTS[i] for i in (4, 0, 3, 1, 2)]
    with pytest.raises(IndexError):
        documents[5]
    with pytest.raises(WrongUse, match=r"has no column 'txt'; did you mean 'text'\?. For samples of several: columns="):
        Parquet(path, "txt")


TABLE = {
    "x": [0.5, 1.5, 2.5, 3.5, 4.5],
    "label": [0, 1, 2, 1, 0],
    "flag": [True, False, True, True, False],
    "vector": [[1.0 * i, 2.0 * i] for i in range(5)],
    "ids": [list(range(i)) for i in range(5)],
    "text": TEXTS,
}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.parquet"
    columns = TABLE | {"kind": pa.array(["a", "b", "a", "b", "b"]).dictionary_encode()}
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return path


def test_columns_are_samples(table: Path) -> None:
    samples = Parquet(table, columns=["x", "label", "flag", "vector", "ids", "text", "kind"])
    assert len(samples) == 5
    for index in (4, 0, 3):
        sample = samples[index]
        for name in ("x", "label", "flag", "vector", "ids"):
            assert isinstance(sample[name], torch.Tensor)
            assert sample[name].tolist() == TABLE[name][index]
        assert sample["text"] == TEXTS[index]
        assert sample["kind"] == "ababb"[index]
    with pytest.raises(IndexError):
        samples[5]
    assert column_of(samples, "label").tolist() == TABLE["label"]
    assert not samples.by_rows


def test_columns_of_numbers_are_read_as_arrays_are(table: Path) -> None:
    samples = Parquet(table, columns=["x", "label", "vector"])
    assert by_rows(samples)
    assert by_rows(split(samples, 2)[0])
    batch = samples.batch(np.array([3, 1]))
    assert {name: column.tolist() for name, column in batch.items()} == {
        "x": [3.5, 1.5], "label": [1, 1], "vector": [[3.0, 6.0], [1.0, 2.0]],
    }  # fmt: skip
    loader = Loader(samples, Task().collate, Order(5, 2), micro_batches=1, ranks=1, rank=0, plain=True)
    assert next(iter(loader.batches(0, 1)))["vector"].shape == (2, 2)


def test_columns_that_are_no_samples_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    odd = {"gap": [1, None, 3], "holes": [[1], [2, None], []], "when": pa.array([1, 2, 3], pa.timestamp("s"))}
    pq.write_table(pa.table(odd), path)
    for name, why in (("gap", "1 row without a value"), ("holes", "1 row without"), ("when", r"is timestamp\[")):
        with pytest.raises(WrongUse, match=why):
            Parquet(path, columns=[name])
    with pytest.raises(WrongUse, match="no column 'gaps'; did you mean 'gap'"):
        Parquet(path, columns=["gaps"])
    path.write_bytes(b"PAR1 damaged")
    with pytest.raises(WrongUse, match="is no parquet file that can be read"):
        Parquet(path, columns=["gap"])
