"""The verbs ``doctor`` and ``probe``; what they find is tested in ``tests/train``."""

from __future__ import annotations

from pathlib import Path

from tests.test_cli import phalanx


def test_what_cannot_be_asked_is_refused_in_a_line(tmp_path: Path) -> None:
    for verb in ("doctor", "probe"):
        done = phalanx(verb, "--on", "local:1", "--max-nodes", "2", "--meet", "node1:29400", cwd=tmp_path)
        assert done.returncode == 2
        assert "several hosts need one folder that all of them see" in done.stderr
    done = phalanx("probe", "--device", "cpu", "--out", "nowhere/cluster.toml", cwd=tmp_path)
    assert done.returncode == 3
    assert "nowhere is no folder to write cluster.toml to" in done.stderr
