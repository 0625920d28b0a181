"""Whole weights from rows, parts and stages: on every rank, as described, whatever the layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import phalanx
from phalanx import Layout
from tests.layouts import task_for
from tests.ranks import Ranks


def state(layout: Layout) -> dict[str, Tensor]:
    with phalanx.Engine(task_for(layout), layout, device="cpu") as engine:
        described = engine.spread.whole.description()
        weights = engine.whole_weights()
        assert [(n, d, s) for n, d, s in described] == [(n, t.dtype, t.shape) for n, t in weights.items()]
        return {name: tensor.clone() for name, tensor in weights.items()}


@pytest.mark.parametrize("layout", ["tp=2,pp=2,micro_batch=8", "fsdp=2,cp=2,ep=4", "fsdp=2,pp=2,schedule=interleaved"])
def test_initial_weights_do_not_depend_on_the_layout(ranks: Ranks, layout: str) -> None:
    parsed = Layout.parse(layout)
    with phalanx.Engine(task_for(parsed), Layout(), device="cpu") as engine:
        expected = engine.whole_weights()
    for found in ranks(4, state, parsed):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
