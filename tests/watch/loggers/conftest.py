"""A run that several tests look at."""

from __future__ import annotations

import pytest

from phalanx.run import Run
from tests.watch.loggers.runs import trained


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (the dev extra has it)")
    return trained(tmp_path_factory.mktemp("logged"), "csv", "tensorboard")
