"""Weights under a layout, as a dry run lists them."""

from __future__ import annotations

import torch

from phalanx import Layout
from phalanx.anatomy import Anatomy
from phalanx.models.transformer import Transformer, TransformerConfig
from phalanx.parallel.weights.placement import Placement
from phalanx.train.listing import listed


def table(layout: str, every: bool = False) -> dict[str, list[str]]:
    with torch.device("meta"):
        model = Transformer(TransformerConfig(width=24, heads=4, kv_heads=2, layers=4, vocabulary=29))
    model.head.weight.requires_grad = False
    lines = listed(Placement.of(model, Anatomy.of(model), Layout.parse(layout)), every)
    return {cells[0]: cells[1:] for cells in ([c.strip() for c in line.split("  ") if c.strip()] for line in lines)}


def test_blocks_that_are_alike_are_one_line() -> None:
    found = table("fsdp=2,tp=2,pp=2")
    assert found["blocks.*.attention.q_proj.weight (x 4)"] == [
        "24 x 24", "6 x 24", "6 x 24", "tp (dim 0), fsdp (rows), pp (a stage each)", "fsdp",
    ]  # fmt: skip
    assert found["blocks.*.attention_norm.weight (x 4)"] == [
        "24",
        "12",
        "12",
        "fsdp (rows), pp (a stage each)",
        "fsdp, tp",
    ]
    assert found["embedding.weight"] == ["29 x 24", "8 x 24", "8 x 24", "tp (dim 0), fsdp (rows), pp (stage 0)", "fsdp"]
    assert found["head.weight"][2:] == ["nothing", "tp (dim 0), fsdp (rows), pp (stage 1), frozen float32", "none"]
    assert len(found) == len(table("fsdp=2,tp=2,pp=2", every=True)) - 3 * 9


def test_on_one_device_nothing_is_cut() -> None:
    assert table("dp=1", every=True)["blocks.3.feed_forward.up_proj.weight"][3:] == ["nothing", "none"]


def test_under_zero_1_a_rank_has_the_whole_and_updates_its_rows() -> None:
    found = table("fsdp=2,zero=1")["embedding.weight"]
    assert found == ["29 x 24", "29 x 24", "15 x 24", "fsdp (rows)", "fsdp"]
