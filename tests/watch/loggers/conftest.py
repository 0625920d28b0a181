"""A run that several tests look at."""

from __future__ import annotations

import pytest

from phalanx.run import Run
from tests.watch.loggers.runs import trained


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(tmp_path_factory.mktemp("logged"), "csv", "tensorboard")
