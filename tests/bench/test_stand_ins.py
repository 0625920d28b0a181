"""Stand-ins: found where a package is not, and only those."""

from __future__ import annotations

import importlib
import sys

import pytest

from phalanx.bench.stand_ins import StandIns


def test_a_package_that_is_not_there_has_empty_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, StandIns()])
    try:
        module = importlib.import_module("torchdata.stateful.loader")
        assert isinstance(module.Anything, type)
        assert module.Anything[int] is not None
        assert isinstance(module.packages.of_it.Anything(), object)
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("nobody_has_this")
    finally:
        for name in [name for name in sys.modules if name.startswith("torchdata")]:
            del sys.modules[name]
