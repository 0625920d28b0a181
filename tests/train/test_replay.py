"""Replay: whoever computes other bits than most is named, and training does not notice."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import phalanx
from phalanx import WrongUse
from phalanx.train.replay import replay
from tests.comparing import Contrast
from tests.parity import HostileLanguage
from tests.ranks import Ranks


def wrong_bit(gradient: Tensor) -> Tensor:
    wrong = gradient.clone()
    wrong.view(-1).view(torch.int64)[5] ^= 1  # the last bit of a float64
    return wrong


def named(layout: str, bad: list[int]) -> tuple[list[list[int]], list[float]]:
    """What replay says before each step, the bad ones being bad in the second; and the norms of training."""
    said, norms = [], []
    with phalanx.Engine(HostileLanguage(), layout, device="cpu") as engine:
        weight = engine.spread.weights["blocks.1.feed_forward.up_proj.weight"].full
        for batch in engine.batches():
            hook = weight.register_hook(wrong_bit) if batch.step == 1 and dist.get_rank() in bad else None
            said.append(replay(engine, batch.step))
            if hook is not None:
                hook.remove()
            norms.append(engine.step(batch).grad_norm)
    return said, norms


def straight(layout: str) -> list[float]:
    with phalanx.Engine(HostileLanguage(), layout, device="cpu") as engine:
        return [engine.step(batch).grad_norm for batch in engine.batches()]


@pytest.mark.parametrize("layout", ["dp=4,exact=8", "fsdp=4,exact=8", "fsdp=4,zero=2", "dp=2,fsdp=2"])
def test_the_rank_that_computes_other_bits_is_named(ranks: Ranks, layout: str) -> None:
    expected = ranks(4, straight, layout)[0]
    for said, norms in ranks(4, named, layout, [2]):
        assert said == [[], [2], []]
        assert norms == expected, "replay left something behind"


def test_where_no_more_than_half_agree_nobody_can_be_told(ranks: Ranks) -> None:
    assert ranks(2, named, "dp=2", [1])[0][0][1] == [0, 1]


def parts_of_layers() -> None:
    with phalanx.Engine(HostileLanguage(), "tp=2", device="cpu") as engine:
        batch = next(engine.batches())
        with pytest.raises(WrongUse, match="different parts of a micro-batch"):
            replay(engine, batch.step)


def test_ranks_that_share_layers_cannot_be_compared(ranks: Ranks) -> None:
    ranks(2, parts_of_layers)


def compared(layout: str) -> tuple[list[list[int]], list[float], list[float]]:
    found = []
    with phalanx.Engine(Contrast(), layout, device="cpu") as engine:
        pairs = [(replay(engine, batch.step), engine.step(batch).grad_norm) for batch in engine.batches()]
        found = [said for said, _ in pairs], [norm for _, norm in pairs]
    with phalanx.Engine(Contrast(), layout, device="cpu") as engine:
        return *found, [engine.step(batch).grad_norm for batch in engine.batches()]


def test_losses_that_compare_samples_are_replayed(ranks: Ranks) -> None:
    for layout in ("dp=2", "fsdp=2,micro_batch=6"):
        for said, norms, straight in ranks(2, compared, layout):
            assert said == [[], [], []]
            assert norms == straight
