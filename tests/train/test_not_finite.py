"""Where a number that is not finite came from is named: the module and the rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx import Engine
from phalanx.train.not_finite import located
from tests.ranks import Ranks
from tests.tasks import Digits


def planted(layout: str, where: str) -> Any:
    with Engine(Digits(steps=2), layout) as engine:
        own, times = engine.rank == 1, [0]

        def spoil(module: Any, given: Any, output: torch.Tensor) -> torch.Tensor | None:
            times[0] += 1
            return output * float("nan") if own and (where == "module" or times[0] == 1) else None

        if where in ("module", "once"):
            engine.model.get_submodule("1").register_forward_hook(spoil)
        if where == "weight" and own:
            engine.spread.weights["2.weight"].shard.data.view(-1)[0] = float("inf")
            engine.spread.updated()
        if where == "backward":
            engine.model.get_submodule("1").register_full_backward_hook(
                lambda module, into, out: (into[0] * float("nan"),) if own else None
            )
        batch = next(engine.batches())
        before = [buffer.clone() for buffer in engine.model.buffers()]
        metrics = engine.step(batch)
        assert metrics.bad
        found = located(engine, batch)
        assert all(torch.equal(a, b) for a, b in zip(before, engine.model.buffers(), strict=True))
        return found["where"], found["module"], found["rank"]


@pytest.mark.parametrize("layout", ["dp=2", "fsdp=2,zero=3"])
def test_the_module_that_makes_it_is_named(ranks: Ranks, layout: str) -> None:
    for words, module, rank in ranks(2, planted, layout, "module"):
        assert (module, rank) == ("1", 1)
        assert words == "1 gives numbers that are not finite, from some that are, on rank 1"


def test_what_is_not_there_the_second_time_has_a_rank(ranks: Ranks) -> None:
    for words, module, rank in ranks(2, planted, "dp=2", "once"):
        assert (module, rank) == ("", 1)
        assert words.startswith("the loss of rank 1, while all that the model gives is finite")


def test_a_weight_that_was_spoilt_is_named(ranks: Ranks) -> None:
    for words, module, rank in ranks(2, planted, "dp=2", "weight"):
        assert (module, rank) == ("2.weight", 1)
        assert "was not finite before" in words


def test_of_a_backward_the_weights_are_named(ranks: Ranks) -> None:
    for words, module, _ in ranks(2, planted, "dp=2", "backward"):
        assert module == "0.bias"
        assert "came up in backward" in words
