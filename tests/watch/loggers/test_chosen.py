"""Loggers by name, as the command line asks for them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from phalanx import WrongUse
from phalanx.watch.loggers import CSV, Prometheus, TensorBoard
from phalanx.watch.loggers.chosen import NAMES, chosen
from tests.test_cli import phalanx


def test_one_of_each() -> None:
    first, second, third = chosen(["csv", "tensorboard", "csv"], "9090")
    assert (type(first), type(second), type(third)) == (CSV, TensorBoard, Prometheus)
    assert chosen([], None) == []


@pytest.mark.parametrize("name", [name for name in NAMES if name != "csv"])
def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    found = importlib.util.find_spec

    def without(package: str, *more: Any) -> Any:
        return None if package.startswith(name) else found(package, *more)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(WrongUse, match=rf"pip install {name}"):
        chosen([name], None)


def test_what_cannot_be_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for words, told in (
        (["--log", "tensorbord"], "--log tensorbord is no place to log to; did you mean 'tensorboard'?"),
        (["--metrics-port", "http"], "--metrics-port http is no port"),
    ):
        done = phalanx("train", "gpt", *words, cwd=tmp_path)
        assert done.returncode == 2
        assert told in done.stderr
    assert not list(tmp_path.iterdir())
