"""Clusters: what this machine offers, and what it does not."""

from __future__ import annotations

import pytest
import torch

from phalanx import CannotHere, Cluster, WrongUse


def test_this_machine_as_a_cluster() -> None:
    cluster = Cluster.here(4, "cpu")
    assert (str(cluster), cluster.world, cluster.backend) == ("cpux4*1", 4, "gloo")
    assert cluster.memory_bytes > 0
    assert not torch.cuda.is_initialized(), "counting devices must leave the process fit to fork"


def test_devices_that_are_not_here_are_refused() -> None:
    with pytest.raises(CannotHere, match="this machine has"):
        Cluster.here(1000, "cuda")
    with pytest.raises(WrongUse, match="not known"):
        Cluster.here(1, "tpu")
