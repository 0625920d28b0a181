"""Placement: pure, and what ranks then hold."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
from torch import nn

import phalanx
from phalanx import Layout, WrongUse
from phalanx.anatomy import Anatomy
from phalanx.models.transformer import Transformer, TransformerConfig
from phalanx.parallel.communication.mesh import Grid
from phalanx.parallel.weights.placement import Placement
from phalanx.parallel.weights.weight import Rows
from phalanx.precision import DTYPES
from tests.parity import HostileLanguage
from tests.ranks import Ranks
from tests.tasks import Digits

LAYOUTS = [
    "dp=2,fsdp=4", "fsdp=2,tp=4", "tp=2,pp=2,cp=2", "dp=2,tp=2,pp=2", "fsdp=8,zero=1", "fsdp=2,cp=2,pp=2",
    "fsdp=4,tp=2,offload=params",
]  # fmt: skip


def placed(layout: str, **settings: object) -> Placement:
    options: dict[str, object] = {"width": 24, "heads": 4, "kv_heads": 2, "layers": 4, "vocabulary": 29} | settings
    with torch.device("meta"):
        model = Transformer(TransformerConfig(**options))  # type: ignore[arg-type]
    return Placement.of(model, Anatomy.of(model), Layout.parse(layout))


@pytest.mark.parametrize("layout", [*LAYOUTS, "dp=2,fsdp=2,ep=2,tp=2"])
def test_every_element_is_owned_by_as_many_ranks_as_hold_the_same(layout: str) -> None:
    placement = placed(layout, **({"experts": 4} if "ep=" in layout else {}))
    grids = [Grid(placement.layout, rank) for rank in range(placement.layout.world)]
    for one in placement.weights.values():
        owners: Counter[tuple[int, ...]] = Counter()
        for grid in grids:
            for box in one.boxes(grid):
                ranges = [range(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True)]
                owners.update(product(*ranges))
        assert len(owners) == one.shape.numel(), one.name
        tp = placement.layout.tp if one.cut is None or one.cut.axis != "tp" else len(one.cut.sharers(0))
        assert set(owners.values()) == {placement.layout.dp * tp * len(one.stages)}, one.name


def test_so_much_is_offloaded_as_is_asked_for() -> None:
    policies = {name: one.policy for name, one in placed("offload=params,offload_percent=30").weights.items()}
    shapes = {name: one.shape.numel() for name, one in placed("dp=1").weights.items()}
    hosts = [name for name, policy in policies.items() if policy.offloaded]
    share = sum(shapes[name] for name in hosts) / sum(shapes.values())
    assert 0.3 <= share < 0.3 + max(shapes.values()) / sum(shapes.values())
    assert hosts == list(policies)[: len(hosts)]
    assert all(policy.always_whole != policy.offloaded for policy in policies.values())
    assert all(one.policy.offloaded for one in placed("offload=optimizer").weights.values())


def test_it_is_made_for_ten_thousand_ranks_and_asked_about_any() -> None:
    placement = placed("dp=10,fsdp=16,tp=4,pp=4,cp=4", layers=8, width=64, heads=8)
    assert placement.layout.world == 10240
    for rank in (0, 5000, 10239):
        owned = {one.name: n for one, n in placement.owned(Grid(placement.layout, rank))}
        assert 0 < sum(owned.values()) < sum(one.shape.numel() for one in placement.weights.values()) / 100


def travels(layout: str) -> dict[str, tuple[str, ...]]:
    placement = placed(layout)
    return placement.travels(Grid(placement.layout, 0))


def test_what_is_summed_and_what_travels() -> None:
    placement = placed("dp=2,tp=2,pp=2", tied=True)
    assert placement.summed_over("blocks.0.attention.q_proj.weight") == ("dp",)
    assert placement.summed_over("blocks.0.attention_norm.weight") == ("dp", "tp")
    assert placement.summed_over("embedding.weight") == ("dp", "pp")
    assert placement.weights["embedding.weight"].stages == (0, 1)
    assert placement.travels(Grid(placement.layout, 0)) == {
        "dp": ("all-reduce",), "tp": ("all-gather", "reduce-scatter", "all-to-all"), "pp": ("send", "all-to-all"),
    }  # fmt: skip
    assert travels("fsdp=2,cp=2,cp_kind=ulysses") == {
        "fsdp": ("all-gather", "reduce-scatter"), "cp": ("all-to-all", "all-gather"),
    }  # fmt: skip
    assert travels("dp=1") == {}


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(WrongUse, match="4 heads, which do not divide by tp=8"):
        placed("tp=8")
    with pytest.raises(WrongUse, match=r"pp=8 makes 8 stages"):
        placed("pp=8")


class Adapted(nn.Module):
    """Frozen weights in a dtype of their own and in whole numbers, and an adapter that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 5, bias=False).to(torch.bfloat16).requires_grad_(False)
        self.codes = nn.Parameter(torch.arange(15, dtype=torch.int8).view(5, 3), requires_grad=False)
        self.seen = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)
        self.adapter = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adapter(x) * self.seen + (x @ self.base.weight.to(x.dtype).T).tanh() @ (
            0.1 * self.codes.to(x.dtype)
        )


def test_policies() -> None:
    model = Adapted()
    placement = Placement.of(model, Anatomy.of(model), Layout(fsdp=2), DTYPES["bf16"])
    found = {name: one.policy for name, one in placement.weights.items()}
    assert (found["base.weight"].dtype, found["base.weight"].compute) == (torch.bfloat16, torch.bfloat16)
    assert (found["adapter.weight"].dtype, found["adapter.weight"].compute) == (torch.float32, torch.bfloat16)
    assert (found["codes"].dtype, found["codes"].compute) == (torch.int8, torch.int8)
    assert found["codes"].axes == ("fsdp", "cp")
    assert found["seen"].axes == ()
    assert [name for name, policy in found.items() if policy.trainable] == ["adapter.weight", "adapter.bias"]


class AdaptedTask(Digits):
    def model(self) -> nn.Module:
        return Adapted()


def adapted(layout: str) -> tuple[dict[str, tuple[torch.dtype, torch.Size]], dict[str, torch.Tensor]]:
    with phalanx.Engine(AdaptedTask(precision="bf16"), layout, device="cpu") as engine:
        for batch in engine.batches():
            engine.step(batch)
        shards = {name: (weight.shard.dtype, weight.shard.shape) for name, weight in engine.spread.weights.items()}
        return shards, engine.whole_weights()


@pytest.mark.parametrize("zero", [1, 3])
def test_frozen_weights_are_sharded_as_they_are_and_nothing_changes(ranks: Ranks, zero: int) -> None:
    _, one = adapted("dp=1")
    shards, whole = ranks(2, adapted, f"fsdp=2,zero={zero}")[0]
    assert shards["base.weight"] == (torch.bfloat16, (3, 4))
    assert shards["codes"] == (torch.int8, (3, 3))
    assert whole["base.weight"].dtype == torch.bfloat16
    assert whole.keys() == one.keys()
    for name, tensor in one.items():
        assert (
            torch.equal(whole[name], tensor)
            if not tensor.is_floating_point()
            else torch.allclose(whole[name], tensor, rtol=0.02, atol=0.02)
        ), name


def held(layout: str) -> dict[str, tuple[torch.Size, int, int]]:
    with phalanx.Engine(HostileLanguage(), layout, device="cpu") as engine:
        placement, mesh = engine.spread.placement, engine.mesh
        assert set(engine.spread.weights) == {n for n, one in placement.weights.items() if one.here(mesh)}
        for name, weight in engine.spread.weights.items():
            one = placement.weights[name]
            assert one.rows(mesh) == Rows(weight.shape, weight.first, weight.last)
        return {name: (weight.shape, weight.first, weight.last) for name, weight in engine.spread.weights.items()}


@pytest.mark.parametrize("layout", ["fsdp=2,tp=2", "tp=2,pp=2", "dp=2,fsdp=2", "fsdp=2,cp=2"])
def test_ranks_hold_what_it_says(ranks: Ranks, layout: str) -> None:
    assert len(ranks(4, held, layout)) == 4
