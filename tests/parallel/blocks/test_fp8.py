"""Training in 8 bits: which linears, with which scales, under any layout, and after a resume."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import phalanx
from phalanx.errors import CannotHere, WrongUse
from phalanx.parallel.blocks import fp8
from phalanx.parallel.forward.wrapper import wrapper
from phalanx.recipes.gpt import GPT
from phalanx.task import Precision
from phalanx.train.overview import Overview
from tests.ranks import Ranks


def task(precision: Precision = "fp8", **settings: Any) -> GPT:
    defaults: dict[str, Any] = {"width": 64, "layers": 4, "length": 24, "megabytes": 0.3, "global_batch": 8, "steps": 5}
    return GPT(precision=precision, **defaults | settings)


def trained(layout: str, precision: Precision = "fp8", steps: int = 5) -> tuple[list[float], dict[str, Any] | None]:
    with phalanx.Engine(task(precision, steps=steps), layout, device="cpu") as engine:
        return [engine.step(batch).loss for batch in engine.batches()], engine.spread.scales()


def test_blocks_linears_and_the_heads_gradients_are_in_8_bits() -> None:
    with phalanx.Engine(task(layers=2), "dp=1", device="cpu") as engine:
        own = engine.spread.fp8
        assert own is not None
        assert len(own.names) == 14
        model: Any = engine.model
        assert repr(wrapper(model.blocks[1].attention.q_proj)) == "fp8 > Linear.forward"
        assert repr(wrapper(model.head)) == "fp8 gradients > Head.forward"
        assert "linears of blocks float8 tensorwise" in engine.dtypes.table()


@pytest.mark.parametrize("precision", ["fp8", "fp8_rowwise"])
def test_losses_are_near_those_of_bf16(precision: Precision) -> None:
    narrow, wide = trained("dp=1", precision)[0], trained("dp=1", "bf16")[0]
    assert narrow == pytest.approx(wide, rel=3e-3)
    assert narrow != wide


@pytest.mark.parametrize("layout", [
    "dp=2", "fsdp=2,recompute=selective", "tp=2", "cp=2", "pp=2,schedule=interleaved,micro_batch=2",
    "fsdp=2,zero=2,recompute=full,micro_batch=2",
])  # fmt: skip
def test_every_layout_trains_like_one_device_and_has_the_same_scales(ranks: Ranks, layout: str) -> None:
    one, alone = trained("dp=1")
    every = ranks(2, trained, layout)
    for losses, scales in every:
        assert losses == pytest.approx(one, rel=1e-3)
        assert scales == every[0][1]
        assert scales is not None
        assert alone is not None
        assert scales.keys() == alone.keys()


def test_scales_are_those_of_the_step_before_and_linears_with_one_input_share_its() -> None:
    with phalanx.Engine(task(), "dp=1", device="cpu") as engine:
        own = engine.spread.fp8
        assert own is not None
        assert not any(layer.known for layer in own.layers)
        batches = engine.batches()
        engine.step(next(batches))
        assert all(layer.known for layer in own.layers)
        weight = engine.spread.weights["blocks.0.attention.q_proj.weight"]
        engine.step(next(batches))
        assert float(own.maxima[0, 1]) == pytest.approx(float(weight.shard.detach().abs().max()), rel=0.1)
        q, k, v, o, gate, up, down = own.layers[:7]
        assert q.of_x is k.of_x is v.of_x is q.maxima
        assert gate.of_x is up.of_x is gate.maxima
        assert o.of_x is o.maxima
        assert down.of_x is down.maxima


def test_a_resumed_run_goes_on_with_the_same_bits() -> None:
    with phalanx.Engine(task(), "dp=1", device="cpu") as engine:
        batches = engine.batches()
        for _ in range(3):
            engine.step(next(batches))
        facts = engine.facts()
        weights = {name: weight.shard.detach().clone() for name, weight in engine.spread.weights.items()}
        state = engine.optimizer.state_dict()["state"]
        moments = {index: {key: value.clone() for key, value in each.items()} for index, each in state.items()}
        expected = engine.step(next(batches)).loss, engine.step(next(batches)).loss
    with phalanx.Engine(task(), "dp=1", device="cpu") as engine:
        with torch.no_grad():
            for name, weight in engine.spread.weights.items():
                weight.shard.copy_(weights[name])
        engine.optimizer.load_state_dict({**engine.optimizer.state_dict(), "state": moments})
        engine.resume(facts)
        batches = engine.batches()
        assert (engine.step(next(batches)).loss, engine.step(next(batches)).loss) == expected


def test_a_linear_that_was_not_used_yet_measures_for_itself() -> None:
    with phalanx.Engine(task(), "dp=1", device="cpu") as engine:
        own, batches = engine.spread.fp8, engine.batches()
        assert own is not None
        engine.step(next(batches))
        state = own.state()
        del state["linears"]["blocks.1.attention.o_proj"]
        own.restore(state)
        assert [name for name, layer in zip(own.names, own.layers, strict=True) if not layer.known] == [
            "blocks.1.attention.o_proj"
        ]
        assert engine.step(next(batches)).loss == pytest.approx(trained("dp=1")[0][1], rel=1e-3)
        assert all(layer.known for layer in own.layers)


def test_numbers_that_are_not_finite_leave_scales_as_they_were() -> None:
    with phalanx.Engine(task(), "dp=1", device="cpu") as engine:
        own, batches = engine.spread.fp8, engine.batches()
        assert own is not None
        engine.step(next(batches))
        before = own.maxima.clone()
        embedding = engine.spread.weights["embedding.weight"].full.detach()
        kept = embedding.clone()
        embedding.fill_(torch.inf)
        assert engine.step(next(batches)).skipped
        embedding.copy_(kept)
        assert torch.equal(own.maxima, before)
        assert not engine.step(next(batches)).skipped
        assert not torch.equal(own.maxima, before)


def test_linears_that_note_nothing_keep_their_scales() -> None:
    """As frozen ones do, before which nothing is trained."""

    @dataclass
    class Frozen(GPT):
        def callbacks(self) -> list[phalanx.Callback]:
            return [phalanx.Freeze(["embedding*", "blocks.0.*"], since=2)]

    frozen_task = Frozen(precision="fp8", width=32, layers=2, length=16, megabytes=0.2, global_batch=2, steps=40)
    with phalanx.Engine(frozen_task, "dp=1", device="cpu") as engine:
        own = engine.spread.fp8
        assert own is not None
        for batch in engine.batches():
            engine.step(batch)
            if batch.step == 1:
                before = own.maxima.clone()
        frozen = torch.tensor([name.startswith("blocks.0.") for name in own.names])
        assert torch.equal(own.maxima[frozen], before[frozen])
        assert not torch.equal(own.maxima[~frozen], before[~frozen])


def test_a_run_that_becomes_narrow_late_measures_in_its_first_step_alone() -> None:
    with phalanx.Engine(task(steps=2000), "dp=1", device="cpu") as engine:
        engine.resume(engine.facts() | {"step": 1000, "fp8": None})
        own = engine.spread.fp8
        assert own is not None
        engine.step(next(engine.batches()))
        assert all(layer.known for layer in own.layers)


def test_only_inputs_that_are_as_large_twice_share_a_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    with phalanx.Engine(task(), "dp=1", device="cpu") as engine:
        own, batches = engine.spread.fp8, engine.batches()
        assert own is not None
        monkeypatch.setattr(
            own.world, "all_reduce_max", lambda found: found[:4].copy_(found[:1].clone())
        )  # o as large as q
        engine.step(next(batches))
        q, k, v, o = own.layers[:4]
        assert o.of_x is q.maxima
        monkeypatch.undo()
        engine.step(next(batches))
        assert o.of_x is o.maxima
        assert q.of_x is k.of_x is v.of_x is q.maxima
        groups = [row[-1] for row in own.state()["linears"].values()]
        own.restore(own.state())
        assert [row[-1] for row in own.state()["linears"].values()] == groups
        assert groups[:4] == ["blocks.0.attention.q_proj"] * 3 + ["blocks.0.attention.o_proj"]


@dataclass
class Odd(GPT):
    """With linears of odd sizes in each block."""

    def model(self) -> nn.Module:
        model = super().model()
        for block in model.blocks:  # type: ignore[union-attr]
            block.feed_forward = nn.Sequential(nn.Linear(self.width, 33), nn.Linear(33, self.width))
        return model


def test_linears_that_do_not_fit_are_named() -> None:
    with phalanx.Engine(Odd(precision="fp8", layers=2, megabytes=0.3), "dp=1", device="cpu") as engine:
        notes = " ".join(Overview(engine).notes())
        assert "multiples of 16: blocks.0.feed_forward.0 [33, 128], and 3 linears more" in notes
        engine.step(next(engine.batches()))
    with pytest.raises(WrongUse, match=r"finds no linear .* Use precision=bf16"):
        phalanx.Engine(GPT(precision="fp8", width=24, heads=2, layers=2, megabytes=0.3), "dp=1", device="cpu")


def test_routers_stay_wide() -> None:
    with phalanx.Engine(task(experts=16, layers=2), "dp=1", device="cpu") as engine:
        assert engine.spread.fp8 is not None
        assert all("attention" in name for name in engine.spread.fp8.names)


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WrongUse, match="Use schedule=interleaved or 1f1b"):
        fp8.check(phalanx.Layout.parse("pp=2,schedule=zb"), torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(CannotHere, match=r"this is a A100. Use precision=bf16"):
        fp8.check(phalanx.Layout(), torch.device("cuda"))
