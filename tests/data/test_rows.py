"""Rows of files: what is there comes in order, in one part or many, and a row that is none is named."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from phalanx import WrongUse
from phalanx.data.rows import BadRow, FilePart, files_of, parts_of, read, rows, text_of

TEXTS = [f"document {i} " + "é" * (i % 7) for i in range(50)]


def as_json(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text, "id": i}, ensure_ascii=False).encode() + b"\n"
                    for i, text in enumerate(texts))  # fmt: skip


def written(folder: Path, name: str) -> Path:
    """The texts in a file of this kind."""
    path, content = folder / name, as_json(TEXTS)
    if name.endswith(".zst"):
        arrow = pytest.importorskip("pyarrow", reason="no pyarrow")
        with arrow.output_stream(str(path), compression="zstd") as file:
            file.write(content)
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(content))
    elif name.endswith(".parquet"):
        arrow = pytest.importorskip("pyarrow", reason="no pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.table({"text": TEXTS, "id": range(50)}), path, row_group_size=7)
    elif name.endswith(".csv"):
        path.write_text("id,text\n" + "".join(f'{i},"{text}"\n' for i, text in enumerate(TEXTS)))
    else:
        path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.csv"])
@pytest.mark.parametrize("size", [1, 100, 1 << 20])
def test_all_rows_come_once_in_any_parts(tmp_path: Path, name: str, size: int) -> None:
    path = written(tmp_path, name)
    assert [row.values["text"] for row in rows(path)] == TEXTS
    parts = parts_of(path, size)
    assert (len(parts) > 1) == (size < 1 << 20 and name in ("a.jsonl", "a.parquet"))
    found = [row for part in parts for row in read(part, ["text"])]
    assert [text_of(row, "text") for row in found] == TEXTS
    assert {row.path for row in found} == {path}


@pytest.mark.parametrize("size", [1, 7, 64, 1 << 20])
def test_a_text_is_cut_between_lines(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("first é\r\n\nthird\nlast without an end".encode())
    parts = [row.values["text"] for part in parts_of(path, size) for row in read(part)]
    assert "".join(parts) == path.read_bytes().decode()
    assert all(part.endswith("\n") for part in parts[:-1])


def test_bad_rows_are_named_by_file_and_row_in_any_part(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [b'{"text": "good"}', b"", b"{broken", b'["a list"]', b'{"text": "more"}', b'{"text": "\xff"}']
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(BadRow, match=r"a\.jsonl, row 3: it is not JSON .* Mend or remove"):
        list(rows(path))
    for size in (1, 5, 17, 1 << 20):
        bad: list[BadRow] = []
        good = [row.values for part in parts_of(path, size) for row in read(part, bad=bad.append)]
        assert good == [{"text": "good"}, {"text": "more"}]
        assert [each.number for each in bad] == [3, 4, 6]
    assert str(pickle.loads(pickle.dumps(bad[0]))) == str(bad[0])


@pytest.mark.parametrize(
    ("values", "said"), [({"txt": "a"}, "did you mean 'txt'"), ({"text": None}, "null"), ({"text": 3}, "a int")]
)
def test_a_field_that_is_no_text_is_named(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(values) + "\n")
    (row,) = rows(path)
    with pytest.raises(BadRow, match=f"row 1: .*{said}"):
        text_of(row, "text")


def test_rows_of_parquet_are_counted_over_row_groups(tmp_path: Path) -> None:
    path = written(tmp_path, "a.parquet")
    assert [part.rows_before for part in parts_of(path, 1)] == list(range(0, 50, 7))
    with pytest.raises(WrongUse, match="no column 'txt'; did you mean 'text'"):
        list(rows(path, ["txt"]))
    (tmp_path / "b.parquet").write_bytes(b"none")
    with pytest.raises(WrongUse, match=r"b\.parquet is no parquet file"):
        list(rows(tmp_path / "b.parquet"))


def test_csv_rows_with_other_cells_are_bad(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('a,b\n1,2\n1\n"two\nlines",3\n1,2,3\n')
    bad: list[BadRow] = []
    assert [row.values for row in rows(path, bad=bad.append)] == [{"a": "1", "b": "2"}, {"a": "two\nlines", "b": "3"}]
    assert [(each.number, each.reason.split(",")[0]) for each in bad] == [(3, "it has 1 cells"), (6, "it has 3 cells")]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_file_that_is_cut_off_is_named(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, name)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(WrongUse, match=rf"{name} cannot be unpacked"):
        list(rows(path))


def test_files_are_found_in_folders_and_what_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("b.jsonl", "a.txt", "picture.png"):
        (tmp_path / "in" / name).write_text("{}\n")
    assert [path.name for path in files_of([tmp_path / "in"])] == ["a.txt", "b.jsonl"]
    for path, said in ((tmp_path / "in" / "picture.png", "no known kind"), (tmp_path / "none.txt", "is not there")):
        with pytest.raises(WrongUse, match=said):
            files_of([path])
    (tmp_path / "empty").mkdir()
    with pytest.raises(WrongUse, match="no file of a known kind"):
        files_of([tmp_path / "empty"])
    (tmp_path / "empty.jsonl").touch()
    assert parts_of(tmp_path / "empty.jsonl", 10) == []
    assert list(read(FilePart(tmp_path / "empty.jsonl"))) == []
