"""A block's layers, as its forward prints them."""

from __future__ import annotations

import pytest
import torch

import phalanx
from phalanx import Layout
from phalanx.parallel.axes.schedules import CHUNKS
from phalanx.parallel.forward.wrapper import wrapper
from tests.parity import HostileLanguage
from tests.ranks import Ranks


def printed(layout: str) -> list[str]:
    parsed = Layout.parse(layout)
    layers = 2 * parsed.pp * CHUNKS.get(parsed.schedule, 1) if parsed.pp > 1 else 2
    with phalanx.Engine(HostileLanguage(layers=layers), parsed, device="cpu") as engine:
        return [repr(wrapper(engine.spread.model.get_submodule(name))) for name in engine.anatomy.blocks]


KEYS = "random keys of blocks.{} > "
OWN = "Block.forward"


@pytest.mark.parametrize(("layout", "first", "last"), [
    ("dp=1", KEYS + "recompute if the model asks > " + OWN, None),
    ("dp=1,recompute=full,compile=blocks", KEYS + "recompute full > compile > " + OWN, None),
    (
        "cp=2,tp=2,recompute=selective",
        "enter: sequence over cp, tp > " + KEYS + "recompute selective > probe > context gather > " + OWN,
        "leave: sequence over cp, tp > " + KEYS + "recompute selective > probe > context gather > " + OWN,
    ),
    (
        "tp=2,pp=2",
        "stage 0 > enter: sequence over tp > " + KEYS + "recompute if the model asks > probe > " + OWN,
        "stage 1 > leave: sequence over tp > " + KEYS + "recompute if the model asks > probe > " + OWN,
    ),
])  # fmt: skip
def test_a_block_prints_what_is_done_around_it(ranks: Ranks, layout: str, first: str, last: str | None) -> None:
    world = Layout.parse(layout).world
    found = printed(layout) if world == 1 else ranks(world, printed, layout)[-1]
    assert found[0] == first.format(0)
    if last is not None:
        assert found[-1] == last.format(len(found) - 1)


def modules(layout: str) -> dict[str, str]:
    with phalanx.Engine(HostileLanguage(), Layout.parse(layout), device="cpu") as engine:
        named = engine.spread.model.named_modules()
        return {name: repr(wrapper(m)) for name, m in named if wrapper(m) is not None}


def test_other_modules_print_theirs(ranks: Ranks) -> None:
    found = ranks(2, modules, "tp=2")[0]
    assert found["blocks.0.attention.q_proj"] == "column-parallel > Linear.forward"
    assert found["blocks.0.attention.o_proj"] == "row-parallel > Linear.forward"
    assert found["blocks.0.attention"] == "tensor-parallel > Attention.forward"
    assert found["embedding"] == "vocabulary-parallel > Embedding.forward"
    staged = ranks(4, modules, "tp=2,pp=2")[0]
    assert staged["embedding"] == "stage 0 > vocabulary-parallel > Embedding.forward"


def test_blocks_compute_in_the_precision_of_the_layout() -> None:
    with phalanx.Engine(HostileLanguage(precision="bf16"), "dp=1", device="cpu") as engine:
        seen = []
        block = engine.spread.model.get_submodule(engine.anatomy.blocks[0])
        block.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
        engine.step(next(iter(engine.batches())))
    assert set(seen) == {torch.bfloat16}
