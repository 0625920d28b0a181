"""The step: one shared decision to skip, precision that means the same everywhere, a scale that finds its range."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import phalanx
from phalanx import Layout
from phalanx.anatomy import Anatomy
from phalanx.train.scale import LossScale
from tests.parity import PRIME, HostileLanguage
from tests.ranks import Ranks
from tests.tasks import Digits


def run(task: phalanx.Task, layout: str) -> tuple[list[dict[str, object]], dict[str, torch.Tensor]]:
    with phalanx.Engine(task, Layout.parse(layout), device="cpu") as engine:
        metrics = [vars(engine.step(batch)) for batch in engine.batches()]
        return metrics, {name: tensor.clone() for name, tensor in engine.whole_weights().items()}


def compare(metrics: list[dict[str, object]], name: str) -> list[object]:
    return [m[name] for m in metrics]


@pytest.mark.parametrize("layout", ["dp=2", "fsdp=2", "fsdp=2,zero=1"])
def test_a_bad_sample_is_skipped_by_all_ranks_together(ranks: Ranks, layout: str) -> None:
    task = Digits(spoil=3, samples=16, steps=4)
    (first, weights), (second, others) = ranks(2, run, task, layout)
    alone, expected = run(task, "dp=1")
    assert compare(first, "skipped") == compare(second, "skipped") == compare(alone, "skipped")
    assert sum(compare(first, "skipped")) == 2, "the bad sample is met once an epoch"
    for name, want in expected.items():
        assert torch.isfinite(weights[name]).all()
        assert torch.allclose(weights[name], want, atol=1e-6)
        assert torch.equal(weights[name], others[name])


class Counts(nn.Module):
    """A block's feed-forward, which counts its calls in one buffer, and in another that it makes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("again", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.again = self.again + 1
        return x + self.down_proj(torch.tanh(self.up_proj(x)))


class Counted(HostileLanguage):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(PRIME, 8), nn.Sequential(Counts(), Counts()), nn.Linear(8, PRIME))

    def anatomy(self, model: nn.Module) -> Anatomy:
        return Anatomy.of(model, blocks="1.*")

    def inputs(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return batch["tokens"]


def buffers(task: phalanx.Task, layout: str) -> dict[str, int]:
    with phalanx.Engine(task, Layout.parse(layout), device="cpu") as engine:
        for batch in engine.batches():
            engine.step(batch)
        return {name: int(buffer) for name, buffer in engine.spread.model.named_buffers()}


def test_trying_blocks_before_the_first_step_leaves_buffers_as_they_were(ranks: Ranks) -> None:
    task = Counted(steps=3)
    alone = buffers(task, "dp=1")
    assert set(alone.values()) == {3}
    assert ranks(2, buffers, task, "tp=2") == [alone, alone]


def test_a_batch_with_nothing_to_learn_is_skipped() -> None:
    class Nothing(Digits):
        def loss(self, output, batch):
            return phalanx.losses.cross_entropy(output, torch.full_like(batch["y"], -100))

    metrics, weights = run(Nothing(steps=2), "dp=1")
    assert compare(metrics, "skipped") == [True, True]
    assert math.isnan(metrics[0]["loss"])
    assert all(torch.isfinite(weight).all() for weight in weights.values())


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 5e-3), ("fp16", 1e-3)])
def test_precision_means_the_same_in_every_layout(ranks: Ranks, precision: str, tolerance: float) -> None:
    """Not equal bits, since sums go in another order; but the same dtypes at the same places."""
    task = Digits(precision=precision, clip=math.inf)
    alone, expected = run(task, "dp=1")
    assert all(weight.dtype == torch.float32 for weight in expected.values())
    for layout in (
        "dp=2",
        "fsdp=2",
        "fsdp=2,zero=2,micro_batch=2",
        "fsdp=2,offload=params,offload_percent=40",
        "dp=2,offload=optimizer",
    ):
        metrics, weights = ranks(2, run, task, layout)[0]
        assert not any(compare(metrics, "skipped")), layout
        assert compare(metrics, "loss") == pytest.approx(compare(alone, "loss"), rel=tolerance), layout
        for name, want in expected.items():
            assert torch.allclose(weights[name], want, rtol=tolerance, atol=tolerance), (layout, name)


def dtypes(precision: str, layout: str) -> dict[str, torch.dtype]:
    with phalanx.Engine(Digits(precision=precision, steps=1), Layout.parse(layout), device="cpu") as engine:
        seen: dict[str, torch.dtype] = {}
        engine.spread.model[0].register_forward_hook(lambda m, a, out: seen.__setitem__("compute", out.dtype))
        engine.step(next(iter(engine.batches())))
        state = next(iter(engine.optimizer.state.values()))
        weight = next(iter(engine.spread.weights.values()))
        bucket = engine.spread.buckets[0]
        assert bucket.owned is not None
        return seen | {
            "parameter": weight.shard.dtype,
            "optimizer": state["exp_avg"].dtype,
            "reduce": bucket.owned.dtype,
        }


@pytest.mark.parametrize("layout", ["dp=2", "fsdp=2", "fsdp=2,zero=2"])
def test_the_printed_table_is_what_happens(ranks: Ranks, layout: str) -> None:
    """For 8 bits, which this model has no linears for: `tests/parallel/blocks/test_fp8.py`."""
    for precision, promised in phalanx.precision.DTYPES.items():
        if promised.fp8 is None:
            assert ranks(2, dtypes, precision, layout)[1] | {"fp8": None} == vars(promised)


def test_the_loss_scale_starts_low_for_large_sums_and_follows_overflows() -> None:
    scale = LossScale(dynamic=True, patience=3)
    scale.begin(lambda: 1024.0)
    assert scale.value == 2**6
    scale.update(finite=False)
    assert scale.value == 2**5
    for _ in range(3):
        scale.update(finite=True)
    assert scale.value == 2**6
    scale.begin(lambda: 1.0)
    assert scale.value == 2**6, "it begins once"
    fixed = LossScale(dynamic=False)
    fixed.begin(lambda: 1024.0)
    fixed.update(finite=False)
    assert fixed.value == 1.0


def test_seconds_by_phase_and_sample_hashes_are_told() -> None:
    metrics, _ = run(Digits(steps=2), "dp=1,micro_batch=4")
    assert set(metrics[0]["seconds"]) == {"data", "forward", "backward", "reduce", "update"}
    assert metrics[0]["samples"] != metrics[1]["samples"]
    assert (metrics[0]["count"], metrics[0]["slots"]) == (8, 8)


def test_a_model_that_draws_where_it_cannot_be_keyed_is_refused() -> None:
    class Shuffles(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x[:, torch.randperm(4)])

    class Task(Digits):
        def model(self):
            return Shuffles(4, 3)

    with pytest.raises(phalanx.WrongUse, match="depend on how the job is spread"):
        run(Task(), "dp=1")
