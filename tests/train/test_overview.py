"""What rank 0 says of an engine is true of its task, its layout and its weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import phalanx
from phalanx.recipes.sft import SFT
from phalanx.train.overview import Overview
from tests.ranks import Ranks
from tests.tasks import Digits


def test_facts_and_notes() -> None:
    with phalanx.Engine(Digits(), phalanx.Layout(zero=2), device="cpu") as engine:
        overview = Overview(engine)
        facts = overview.facts()
        assert list(facts) == ["layout", "model", "memory", "batch", "optimizer", "dtypes"]
        assert facts["dtypes"].startswith("parameter float32 | compute float32")
        (note,) = overview.notes()
        assert note.startswith("zero=2 has no effect")
        assert list(overview.news()) == []


def test_a_warm_up_that_never_ends_is_told() -> None:
    with phalanx.Engine(Digits(steps=4, warmup_steps=10), device="cpu") as engine:
        text = Overview(engine).facts()["optimizer"]
    assert "4 steps of warm-up, which takes 10. Set warmup_steps to fewer" in text


class Split(Digits):
    def anatomy(self, model: nn.Module) -> phalanx.Anatomy:
        return phalanx.Anatomy.of(model, splits={"0": "column"})


def test_splits_that_have_no_effect_are_told() -> None:
    with phalanx.Engine(Split(), device="cpu") as engine:
        (note,) = Overview(engine).notes()
    assert note.startswith("splits of Task.anatomy have no effect for 0 (column): tp cuts columns and rows inside")


def test_what_an_epoch_leaves_out_is_told() -> None:
    with phalanx.Engine(Digits(samples=41, last_batch="drop"), device="cpu") as engine:
        text = Overview(engine).facts()["batch"]
    assert text.startswith("8 samples as 1 micro-batch a step, 41 samples an epoch, 1 of them is left out, others each")


class Frozen(Digits):
    def model(self) -> nn.Module:
        model = super().model()
        model[0].requires_grad_(False)
        return model


def test_what_is_said_of_frozen_weights_and_of_one() -> None:
    with phalanx.Engine(Frozen(), device="cpu") as engine:
        text = "\n".join(Overview(engine).facts().values())
    assert "131 weights, 51 of them trainable" in text
    assert "dp=1 on 1 rank, CPU" in text
    assert "8 samples as 1 micro-batch a step" in text
    assert "weights 524 B, gradients 204 B, optimizer 408 B" in text
    for word in ("detection", "1 micro-batches", "x cpu", " 1 weights"):
        assert word not in text


def shards() -> str:
    with phalanx.Engine(Frozen(), "fsdp=2", device="cpu") as engine:
        return Overview(engine).facts()["here"]


def test_frozen_weights_are_updated_by_nobody(ranks: Ranks) -> None:
    assert ranks(2, shards)[0] == "34 of them updated by rank 0"  # 2 rows of 3, 16 wide, and 2 biases


def told_of_a_base(four_bit: bool, layout: str) -> str:
    task = SFT(small=True, lora=2, four_bit=four_bit, length=64, global_batch=4, steps=2)
    with phalanx.Engine(task, layout, device="cpu") as engine:
        return Overview(engine).facts()["model"]


def test_a_base_in_4_bits_has_as_many_weights_as_it_had(ranks: Ranks) -> None:
    told = told_of_a_base(False, "dp=1")
    assert "3,712 of them trainable" in told
    assert ranks(4, told_of_a_base, True, "tp=2,pp=2,micro_batch=2") == [told] * 4


class Ranked(Digits):
    """Its loss compares all samples of the global batch."""

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> phalanx.Loss:
        every = phalanx.gather(output)
        return phalanx.Loss((output - every.mean(0)).square().sum(), len(output))


def test_what_the_first_steps_find_out_is_news_once() -> None:
    with phalanx.Engine(Ranked(), phalanx.Layout(micro_batch=2), device="cpu") as engine:
        overview = Overview(engine)
        assert list(overview.news()) == []
        engine.step(next(engine.batches()))
        (news,) = overview.news()
        assert "all micro-batches of a step at once" in news
        assert list(overview.news()) == []


class Spoken(Digits):
    def overview(self) -> tuple[dict[str, str], list[str]]:
        return {"rows": "7: 2 held out"}, ["left out: one"]


def test_a_task_says_lines_of_its_own() -> None:
    with phalanx.Engine(Spoken(), device="cpu") as engine:
        overview = Overview(engine)
        assert overview.facts()["rows"] == "7: 2 held out"
        assert overview.notes() == ["left out: one"]


def test_the_optimizer_and_the_schedule_are_told() -> None:
    task = Digits(
        learning_rate=0.02,
        steps=50,
        warmup_steps=3,
        parameters={"0.*": phalanx.ParameterGroup(learning_rate_factor=0.5)},
    )
    with phalanx.Engine(task, device="cpu") as engine:
        told = Overview(engine).facts()["optimizer"]
    assert told.startswith("AdamW at ")
    assert all(part in told.partition(";")[0] for part in ("0.01 with decay 0.1", "0.02 with decay 0.1"))
    assert told.endswith(
        "settings of their own: 0.*; gradients clipped to a norm of 1; cosine down to 0.1 of the rate over 50 steps, "
        "3 of them warm-up"
    )

    class Planned(Digits):
        def schedule(self) -> Any:
            return lambda step: 1.0

    with phalanx.Engine(Planned(steps=50), device="cpu") as engine:
        assert Overview(engine).facts()["optimizer"].endswith("; a schedule of its own over 50 steps")


class Awkward(Digits):
    """A table that asks for sparse gradients and is read little of, and a convolution in channels_last."""

    def model(self) -> nn.Module:
        table, convolution = nn.Embedding(20_000, 2, sparse=True), nn.Conv2d(2, 3, 2)
        head = nn.Sequential(nn.Flatten(), nn.Linear(3, 3))
        return nn.Sequential(table, Pictures(), convolution.to(memory_format=torch.channels_last), head)

    def inputs(self, batch: dict[str, Any]) -> Any:
        return {"input": batch["x"][:, :4].abs().long().clamp(max=9)}


class Reseeded(Digits):
    def model(self) -> nn.Module:
        torch.manual_seed(5)
        return super().model()


class Pictures(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, 2, 2, 2).permute(0, 3, 1, 2)


def notes_of(task: phalanx.Task, layout: str) -> list[str]:
    with phalanx.Engine(task, layout, device="cpu") as engine:
        return Overview(engine).notes()


def test_what_a_model_asks_for_and_does_not_get_is_said(ranks: Ranks) -> None:
    said = "\n".join(notes_of(Awkward(), "dp=1"))
    assert "sparse=True of 0 has no effect: gradients are dense" in said
    assert "channels_last of 2.weight has no effect: weights are kept contiguous" in said
    assert "gathers 0.weight whole" not in said
    assert "fsdp gathers 0.weight whole in every forward (156 KiB)" in "\n".join(
        ranks(2, notes_of, Awkward(), "fsdp=2")[0]
    )
    assert notes_of(Digits(), "dp=1") == []
    assert "torch.manual_seed(5) of the constructor has no effect" in "\n".join(notes_of(Reseeded(), "dp=1"))
