"""``phalanx tokenize`` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.test_cli import phalanx


def test_a_folder_is_made_verified_and_not_made_twice(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": f"document {i}"}) + "\n" for i in range(20)) + "{\n")
    words = ("tokenize", "a.jsonl", "out", "--tokenizer", "bytes", "--field", "body", "--workers", "1")
    stopped = phalanx(*words, cwd=tmp_path)
    assert stopped.returncode == 2
    assert "a.jsonl, row 21: it is not JSON" in stopped.stderr
    done = phalanx(*words, "--bad-rows", "skip", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "out has 210 tokens of 20 documents" in done.stdout
    assert "1 bad rows" in done.stdout
    again = phalanx(*words, "--json", cwd=tmp_path)
    assert json.loads(again.stdout)["holds"]
    (tmp_path / "out" / "shard-00000.tokens").write_bytes(b"\0" * 420)
    damaged = phalanx("verify", "out", cwd=tmp_path)
    assert damaged.returncode == 1
    assert "shard-00000.tokens is not what was written" in damaged.stdout
    refused = phalanx("tokenize", "out", "--tokenizer", "bytes", cwd=tmp_path)
    assert refused.returncode == 2
    assert "name the inputs and then" in refused.stderr
