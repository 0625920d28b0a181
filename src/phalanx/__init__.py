"""Phalanx trains PyTorch models on one device or thousands with the same code."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx import data, losses, optim, prove, train
    from phalanx.anatomy import Anatomy
    from phalanx.callbacks import EMA, Callback, EarlyStopping, Freeze, KeepBest, ReduceLROnPlateau
    from phalanx.cluster import Cluster
    from phalanx.errors import CannotHere, WrongUse
    from phalanx.gathering import gather, rows
    from phalanx.layout import Layout
    from phalanx.logits import Logits
    from phalanx.losses import Loss
    from phalanx.metrics import log
    from phalanx.parameters import ParameterGroup
    from phalanx.run import Run
    from phalanx.task import Task
    from phalanx.train.check.checking import check
    from phalanx.train.engine import Engine
    from phalanx.train.from_python import RunFailed
    from phalanx.verdict import Verdict
    from phalanx.watch import loggers

__version__ = "0.1.0"
__all__ = [
    "EMA", "Anatomy", "Callback", "CannotHere", "Cluster", "EarlyStopping", "Engine", "Freeze", "KeepBest", "Layout",
    "Logits", "Loss", "ParameterGroup", "ReduceLROnPlateau", "Run", "RunFailed", "Task", "Verdict", "WrongUse",
    "check", "data", "gather", "load", "log", "loggers", "losses", "optim", "prove", "rows", "save", "train",
]  # fmt: skip

_HOMES = {
    "Anatomy": "anatomy", "Callback": "callbacks", "CannotHere": "errors", "Cluster": "cluster", "EMA": "callbacks",
    "EarlyStopping": "callbacks", "Engine": "train.engine", "Freeze": "callbacks", "KeepBest": "callbacks",
    "Layout": "layout", "ReduceLROnPlateau": "callbacks",
    "Logits": "logits", "Loss": "losses", "ParameterGroup": "parameters", "Run": "run",
    "RunFailed": "train.from_python", "Task": "task", "Verdict": "verdict", "WrongUse": "errors",
    "check": "train.check.checking", "gather": "gathering", "load": "train.restoring",
    "log": "metrics",
    "rows": "gathering", "save": "train.checkpointing",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import on first use, so that ``phalanx --help`` and a typing error need not wait for torch."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"phalanx.{_HOMES[name]}"), name)
    if name == "loggers":
        return importlib.import_module("phalanx.watch.loggers")
    if name in ("data", "losses", "optim", "prove", "task", "train"):
        return importlib.import_module(f"phalanx.{name}")
    raise AttributeError(f"module 'phalanx' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
