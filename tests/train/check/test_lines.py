"""Lines of the user's own files are told from all others."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from phalanx.train.check import lines


def raised(act: Any) -> str:
    try:
        act()
    except Exception as error:
        return lines.of_error(error)
    raise AssertionError


def test_the_innermost_line_is_not_a_librarys() -> None:
    assert "F.linear(torch.ones(2, 3)" in raised(lambda: F.linear(torch.ones(2, 3), torch.ones(2, 2)))
    assert 'Path("/nowhere/at all").read_text()' in raised(lambda: Path("/nowhere/at all").read_text())
    assert raised(lambda: json.loads("{")).startswith("tests/train/check/test_lines.py:")


def _chosen(value: int) -> int:
    if value > 1:
        return 1
    return 0


def test_where_a_function_returned() -> None:
    with lines.returns(_chosen) as found:
        _chosen(2)
        assert found().endswith("return 1")
        _chosen(0)
        assert found().endswith("return 0")
    with lines.returns(json.loads) as found:
        json.loads("1")
        assert found() == ""


def _draws() -> float:
    first = 1.0
    first += float(np.random.rand())
    return first + random.random()


def test_the_first_line_that_draws() -> None:
    with lines.that_draws() as found:
        _draws()
    assert found().endswith("first += float(np.random.rand())")
    with lines.that_draws() as found:
        _chosen(3)
    assert found() == ""


def test_where_a_method_begins() -> None:
    assert lines.of(_chosen).endswith("def _chosen(value: int) -> int:")
    assert lines.of(torch.nn.Linear.forward) == ""
    assert lines.first_of(torch.nn.Linear, _draws).endswith("def _draws() -> float:")
