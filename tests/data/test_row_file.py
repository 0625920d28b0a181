"""RowFile of every kind of file are the same rows, and a bad one is named by where it stands."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from tqdm import tqdm

from phalanx import WrongUse
from phalanx.data.row_file import RowFile

ROWS = [{"question": f"what is {n}?", "answer": f'"{n}",\nof course'} for n in range(5)]


def written(folder: Path, kind: str) -> Path:
    path = folder / f"rows{kind}"
    if kind == ".jsonl":
        path.write_text("\n\n".join(map(json.dumps, ROWS)))
    elif kind == ".json":
        path.write_text(json.dumps(ROWS, indent=1))
    elif kind == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["question", "answer"])
            writer.writeheader()
            writer.writerows(ROWS)
    elif kind == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=2)
    else:
        datasets = pytest.importorskip("datasets", reason="datasets is not installed (the dev extra has it)")
        whole = datasets.Dataset.from_list(ROWS)
        (datasets.DatasetDict(train=whole) if kind == "several" else whole).save_to_disk(str(path))
    return path


@pytest.mark.parametrize("kind", [".jsonl", ".json", ".csv", ".parquet", "one", "several"])
def test_every_kind_gives_the_same_rows(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # or its bar leaves a thread behind
    rows = RowFile(written(tmp_path, kind))
    assert [rows[index] for index in range(len(rows))] == ROWS
    with pytest.raises(IndexError):
        rows[5]


def test_a_row_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n{"a": \n[1]\n')
    rows = RowFile(path)
    assert rows.number(1) == 3
    with pytest.raises(WrongUse, match=r"rows.jsonl, row 3: not JSON"):
        rows[1]
    with pytest.raises(WrongUse, match=r"rows.jsonl, row 4: a list, not an object"):
        rows[2]


@pytest.mark.parametrize("kind", [".jsonl", ".json", ".csv"])
def test_a_byte_order_mark_is_no_part_of_the_first_name(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path, kind)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    rows = RowFile(path)
    assert [rows[index] for index in range(len(rows))] == ROWS


def test_a_row_with_other_cells_than_the_first_line_is_bad_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('question,answer\n1,"a\nb"\n2\n3,c,d\n4,e\n')
    rows = RowFile(path)
    assert len(rows) == 4
    assert (rows[0], rows[3]) == ({"question": "1", "answer": "a\nb"}, {"question": "4", "answer": "e"})
    assert rows.number(3) == 6
    for index, cells in ((1, 1), (2, 3)):
        with pytest.raises(WrongUse, match=rf"rows\.csv, row {index + 3}: it has {cells} cells, and the first line 2"):
            rows[index]


@pytest.mark.parametrize("place", [4, -60])
def test_a_damaged_parquet_file_is_refused(tmp_path: Path, place: int) -> None:
    path = written(tmp_path, ".parquet")
    content = bytearray(path.read_bytes())
    content[place : place + 20] = b"\xff" * 20
    path.write_bytes(content)
    with pytest.raises(WrongUse, match="is no parquet file that can be read"):
        RowFile(path)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(WrongUse, match="is no parquet file that can be read"):
        RowFile(path)


def test_what_holds_no_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "rows.txt").write_text("hello")
    for name, words in {
        "empty.jsonl": "is empty: it has no row",
        "rows.txt": "is none of .jsonl, .json, .csv, .parquet",
        "nowhere.csv": "is not there",
    }.items():
        with pytest.raises(WrongUse, match=words):
            RowFile(tmp_path / name)


def test_a_folder_that_datasets_did_not_leave_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed: pip install 'phalanx[sft]'")
    with pytest.raises(WrongUse, match="not one that datasets' save_to_disk left"):
        RowFile(tmp_path)
