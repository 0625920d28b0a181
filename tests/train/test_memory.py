"""What a rank holds is what arithmetic says: of every optimizer that can be seen or is known, under every axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, optim

import phalanx
from phalanx import EMA, Engine, Layout
from phalanx.anatomy import Anatomy
from phalanx.local_updates import LocalUpdates
from phalanx.optim import SOAP, AdamW
from phalanx.parallel.communication.mesh import Grid
from phalanx.parallel.weights.blueprint import Blueprint
from phalanx.parallel.weights.matrices import COPY
from phalanx.parallel.weights.outer import OuterWeights
from phalanx.parallel.weights.placement import Placement
from phalanx.precision import DTYPES, Dtypes
from phalanx.recipes.sft import SFT
from phalanx.train.memory import Kept, KeptBySites, Memory, fullest, held, owned_state
from phalanx.trees import leaves
from phalanx.words import in_bytes as written
from tests.parity import HostileLanguage
from tests.ranks import Ranks

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: optim.SGD(p, 0.1),
    "momentum": lambda p: optim.SGD(p, 0.1, momentum=0.9),
    "fused": lambda p: optim.AdamW(p, fused=True),
    "amsgrad": lambda p: optim.Adam(p, amsgrad=True),
    "fused amsgrad": lambda p: optim.Adam(p, amsgrad=True, fused=True),
    "rmsprop": lambda p: optim.RMSprop(p, centered=True, momentum=0.9),
    "adagrad": lambda p: optim.Adagrad(p),
    "asgd": lambda p: optim.ASGD(p),
    "rprop": lambda p: optim.Rprop(p),
    "adafactor": lambda p: optim.Adafactor(p),
    "soap": lambda p: SOAP(p),
    "narrow": lambda p: AdamW(p, moments="bfloat16"),
    "narrower": lambda p: AdamW(p, moments="float8"),
    "narrow beside fused": lambda p: {
        "narrow": AdamW(p[1:], moments="float8"), "fused": optim.AdamW(p[:1], fused=True),
    },
    "several": lambda p: {
        "matrices": optim.Muon([w for w in p if w.ndim == 2]), "rest": optim.AdamW([w for w in p if w.ndim != 2]),
    },
}  # fmt: skip


@dataclass
class Kinds(HostileLanguage):
    kind: str = "fused"
    averages: int = 0
    heads: int = 4
    kv_heads: int = 2
    precision: phalanx.task.Precision = "fp32"

    def optimizer(self, params: Any) -> Any:
        return OPTIMIZERS[self.kind](params)

    def callbacks(self) -> list[phalanx.Callback]:
        return [EMA(0.5) for _ in range(self.averages)]


def in_bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors if tensor.ndim)


def found(task: Kinds, layout: str) -> tuple[Memory, int, int, int, int]:
    """What arithmetic says of this rank; what its weights, its optimizer's state, its averages and its sites' are."""
    with Engine(task, layout, device="cpu") as engine:
        engine.step(next(engine.batches()))
        spread, dtypes = engine.spread, engine.dtypes
        used = engine.kept.state | {"unused": 0}  # it gets no gradient
        kept_ = replace(engine.kept, state=used)
        owned = owned_state(spread.placement, kept_)[engine.mesh.index("pp")][engine.mesh.index(*COPY)]
        told = held(spread.placement, engine.mesh, kept_, dtypes, owned)
        kept: list[Tensor] = []
        for weight in spread.weights.values():
            whole = weight.storage.always_whole
            kept += [weight.full] if whole and not weight.apart else [weight.shard, *([weight.full] if whole else [])]
        memory = {tensor.untyped_storage().data_ptr(): tensor for tensor in kept}.values()
        state = leaves([s for w, s in engine.optimizer.state.items() if w.logical_name != "unused"], Tensor)
        averages = [*leaves([*engine.callbacks.tensors().values()], Tensor)]
        weights_bytes = sum(t.numel() * t.itemsize for t in memory)
        return told, weights_bytes, in_bytes(state), in_bytes(averages), sites_bytes(spread.outer)


def sites_bytes(outer: OuterWeights | None) -> int:
    """What sites keep, and have on its way, of the fragment of which that is most."""
    if outer is None:
        return 0
    outer.discard()
    found = [in_bytes(outer.tensors())]
    for number in range(len(outer.fragments)) if outer.local.overlap else ():
        outer.leave(number)
        found.append(in_bytes(outer.tensors()))
        outer.discard()
    return max(found)


@pytest.mark.parametrize("layout", ["dp=2", "fsdp=2", "fsdp=2,zero=1", "tp=2", "pp=2", "cp=2"])
def test_weights_state_and_averages_are_those_of_a_step(ranks: Ranks, layout: str) -> None:
    for told, weights, state, averages, _ in ranks(2, found, Kinds(averages=2), layout):
        assert told.weights == weights
        assert told.optimizer == state
        assert told.averages == averages


@pytest.mark.parametrize("comm", ["local:4", "diloco:4", "diloco:4:overlap=1", "diloco:4:fragments=2:overlap=1"])
def test_what_sites_keep_besides(ranks: Ranks, comm: str) -> None:
    for told, weights, state, averages, sites in ranks(2, found, Kinds(), f"dp=2,comm={comm}"):
        assert (told.weights, told.optimizer, told.averages, told.sites) == (weights, state, averages, sites)
        assert f"sites {written(sites)}" in str(told)


@pytest.mark.parametrize(("codec", "bytes_each"), [("bf16", 2), ("int8", 260 / 256), ("int4", 68 / 128)])
def test_codes_on_their_way_are_counted(codec: str, bytes_each: float) -> None:
    local = LocalUpdates.parse(f"diloco:4:{codec}:overlap=2")
    assert local is not None
    found = KeptBySites.of(local, {"w": 1 << 20}).message(1 << 20, torch.float32)
    assert found == (4 + 3 * bytes_each) * (1 << 20)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_optimizers_keep(ranks: Ranks, kind: str) -> None:
    ((told, _, state, *_),) = ranks(1, found, Kinds(kind=kind), "dp=1")
    assert told.optimizer == state
    for told, _, state, *_ in ranks(2, found, Kinds(kind=kind), "fsdp=2"):
        assert told.optimizer == pytest.approx(state, abs=8)  # a row of three halves of a state is rounded


def placed(layout: str, dtypes: Dtypes) -> Placement:
    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trained = torch.nn.Parameter(torch.ones(100))
            self.frozen = torch.nn.Parameter(torch.ones(100, dtype=torch.bfloat16), requires_grad=False)

    model = Plain()
    return Placement.of(model, Anatomy.of(model), Layout.parse(layout), dtypes)


@pytest.mark.parametrize(
    ("layout", "precision", "expected"),
    [
        ("dp=4", "fp32", (800, 400, 800)),
        ("fsdp=4,zero=1", "fp32", (800, 400, 200)),
        ("fsdp=4,zero=2", "fp32", (800, 100, 200)),
        ("fsdp=4", "fp32", (200, 100, 200)),
        ("dp=4", "bf16", (200 + 400 + 200, 400, 800)),
        ("fsdp=4", "bf16", (100 + 50, 100, 200)),
        ("fsdp=4,offload=optimizer,zero=2", "bf16", (200 + 100 + 200 + 50, 100, 200)),
    ],
)
def test_the_arithmetic_of_zero(layout: str, precision: Any, expected: tuple[int, ...]) -> None:
    kept = Kept({"trained": 800}, frozenset(), 0)
    told = held(placed(layout, DTYPES[precision]), Grid(Layout.parse(layout), 0), kept, DTYPES[precision], 0)
    assert (told.weights, told.gradients, told.optimizer) == expected


@dataclass
class Unmade(HostileLanguage):
    seen: list[int] = field(default_factory=list)

    def optimizer(self, params: Any) -> Any:
        raise ValueError("it wants the weights themselves")


def test_the_fullest_stage_speaks_and_an_optimizer_that_is_not_made_keeps_two() -> None:
    task, layout, dtypes = Unmade(), Layout.parse("pp=2"), DTYPES["fp32"]
    model = Blueprint(task.model, 0).model
    placement = Placement.of(model, task.anatomy(model), layout)
    kept = Kept.of(task, placement, dtypes, [])
    trained = {name: one.shape for name, one in placement.weights.items() if one.policy.trainable}
    assert kept.state == {name: 8 * shape.numel() for name, shape in trained.items()}
    both = [held(placement, Grid(layout, rank), kept, dtypes, 0) for rank in range(2)]
    assert fullest(placement, kept, dtypes).total == max(one.total for one in both)
    assert both[0].total != both[1].total
    assert str(Memory(1, 2, 3)) == "6 B a rank without activations: weights 1 B, gradients 2 B, optimizer 3 B"


def test_the_owner_of_the_largest_matrix_speaks() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(50, 50, bias=False), torch.nn.Linear(50, 2, bias=False))
    placement = Placement.of(model, Anatomy.of(model), Layout(dp=2, fsdp=4))
    kept = Kept({"0.weight": 10_000, "1.weight": 400}, frozenset({"0.weight", "1.weight"}), 0)
    assert fullest(placement, kept, DTYPES["fp32"]).optimizer == 10_000
    assert sorted(owned_state(placement, kept)[0]) == [0, 0, 400, 10_000]


def tuned(four_bit: bool) -> tuple[int, int]:
    """Bytes that this rank holds between two steps of LoRA, and all ranks by arithmetic."""
    task = SFT(
        small=True, lora=2, four_bit=four_bit, precision="bf16", base_dtype="bf16", length=64, global_batch=4, steps=2,
    )  # fmt: skip
    with Engine(task, "fsdp=4", device="cpu") as engine:
        for batch in engine.batches():
            engine.step(batch)
        spread, weights = engine.spread, engine.spread.weights.values()
        kept = [tensor for weight in weights for tensor in (weight.shard, weight.full)]
        buffers = [tensor for bucket in spread.buckets for tensor in (bucket.owned, bucket.gradients)]
        kept += [tensor for tensor in buffers if tensor is not None]
        kept += leaves([*engine.optimizer.state.values()], Tensor)
        storages = {storage.data_ptr(): storage.nbytes() for t in kept if (storage := t.untyped_storage()).nbytes()}
        assert not any(weight.shard.grad is not None or weight.full.grad is not None for weight in weights)
    trained = sum(weight.rows * weight.row_size for weight in weights if weight.trainable)
    real = {weight.name: 2 if weight.shard.is_floating_point() else weight.shard.itemsize for weight in weights}
    frozen = sum(weight.rows * weight.row_size * real[weight.name] for weight in weights if not weight.trainable)
    return sum(storages.values()), frozen + (4 + 4 + 8) * trained


@pytest.mark.parametrize("four_bit", [False, True], ids=["LoRA", "QLoRA"])
def test_frozen_weights_are_held_once_and_narrow(ranks: Ranks, four_bit: bool) -> None:
    """No wide copy of them, none whole, no gradients and no moments."""
    pytest.importorskip("transformers", reason="transformers is not installed (the dev extra has it)")
    found = ranks(4, tuned, four_bit)
    assert sum(held for held, _ in found) == pytest.approx(found[0][1], rel=0.1)
