"""What cannot be saved is refused by name."""

from __future__ import annotations

import pytest
import torch

from phalanx import Engine
from phalanx.checkpoint.state import State
from phalanx.errors import WrongUse
from tests.tasks import Digits


def test_what_cannot_be_saved_is_named() -> None:
    with Engine(Digits(), device="cpu") as engine:
        state = State(engine.spread, engine.optimizer)
        weight = engine.spread.weights["0.weight"].shard
        for value, words in (
            ([1, 2], "keeps 'strange' of 0.weight as a list, which cannot be saved"),
            (torch.zeros(2), r"keeps 'strange' of 0.weight as a Tensor of shape \(2,\), which cannot be saved"),
        ):
            engine.optimizer.state[weight] = {"strange": value}
            with pytest.raises(WrongUse, match=words):
                list(state.entries())
        engine.optimizer.state.clear()
        engine.optimizer.state["all"] = {"k": 1}
        with pytest.raises(WrongUse, match="keeps 'all' in its state, which belongs to no weight"):
            list(state.entries())
