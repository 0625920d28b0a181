"""The same bits at any number of ranks: weights, losses, norms and measures, on hostile data."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import phalanx
from phalanx import Layout, WrongUse
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.weights import bucket
from tests.parity import HostileLanguage, HostileVision, Sentences
from tests.ranks import Ranks


class Numbered(Sentences):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {**super().__getitem__(index), "index": torch.tensor(index)}


@dataclass
class Hostile(HostileLanguage):
    """An epoch's last step has fewer samples than there are virtual micro-batches; one sample's loss is no number."""

    samples: int = 36
    steps: int = 4
    poison: int = 11

    def data(self) -> Numbered:
        return Numbered(self.samples)

    def held_out(self) -> Numbered:
        return Numbered(21)

    def collate(self, samples: Any) -> dict[str, Tensor]:
        return {**super().collate(samples), "index": torch.stack([sample["index"] for sample in samples])}

    def loss(self, output: Any, batch: dict[str, Tensor]) -> phalanx.Loss:
        loss = super().loss(output, batch)
        poisoned = bool((batch["index"] == self.poison).any()) and torch.is_grad_enabled()
        return phalanx.Loss(loss.total * (float("nan") if poisoned else 1.0), loss.count)


@dataclass
class Outcome:
    weights: str
    steps: list[tuple[str, str, bool]]
    """Loss, gradient norm, and whether the step was skipped."""
    measures: dict[str, float]


def digest(weights: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        found.update(name.encode() + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def trained(cases: list[tuple[phalanx.Task, str]]) -> list[Outcome]:
    """Each case in turn; messages large and small, in one bucket or many: it must not matter."""
    found = []
    for number, (task, layout) in enumerate(cases):
        with ExitStack() as stack:
            if number % 2:
                stack.enter_context(mock.patch.object(Communicator, "small_bytes", 0))
                stack.enter_context(mock.patch.object(bucket, "BUCKET_BYTES", 1 << 12))
            engine = stack.enter_context(phalanx.Engine(task, layout, device="cpu"))
            steps = [(m.loss.hex(), m.grad_norm.hex(), m.skipped) for m in map(engine.step, engine.batches())]
            found.append(Outcome(digest(engine.whole_weights()), steps, engine.evaluate()))
    return found


LAYOUTS: dict[int, list[str]] = {
    1: ["exact=8", "recompute=full,exact=8"],
    2: ["dp=2,exact=8", "fsdp=2,zero=1,exact=8", "fsdp=2,zero=2,exact=8", "fsdp=2,zero=3,exact=8"],
    4: ["dp=4,exact=8", "fsdp=4,zero=3,exact=8", "dp=2,fsdp=2,zero=1,exact=8", "dp=2,fsdp=2,zero=2,exact=8"],
    8: ["dp=8,exact=8", "dp=4,fsdp=2,zero=2,exact=8", "dp=2,fsdp=4,zero=3,exact=8", "fsdp=8,zero=1,exact=8"],
}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "float64"])
def test_any_number_of_ranks_gives_the_same_bits(ranks: Ranks, precision: Any) -> None:
    outcomes: dict[str, Outcome] = {}
    for world, layouts in LAYOUTS.items():
        chosen = layouts if precision == "fp32" else layouts[1:2]
        for answers in ranks(world, trained, [(Hostile(precision=precision), layout) for layout in chosen]):
            for layout, outcome in zip(chosen, answers, strict=True):
                assert outcomes.setdefault(layout, outcome) == outcome, f"{layout}: ranks disagree"
    first = next(iter(outcomes.values()))
    for layout, outcome in outcomes.items():
        assert outcome == first, f"{layout} gives other bits"
    assert {skipped for _, _, skipped in first.steps} == {True, False}


def test_without_exact_sums_the_bits_depend_on_the_ranks(ranks: Ranks) -> None:
    task = Hostile(precision="fp32")
    outcomes = [ranks(world, trained, [(task, f"dp={world}")])[0][0] for world in (1, 2, 4)]
    assert len({outcome.weights for outcome in outcomes}) == 3


def test_more_virtual_micro_batches_than_samples_of_a_rank(ranks: Ranks) -> None:
    """Leaves of one sample each, and 16 of them."""
    task = Hostile(precision="fp32", global_batch=16)
    alone = trained([(task, "exact=16")])[0]
    assert ranks(4, trained, [(task, "dp=2,fsdp=2,exact=16")])[0][0] == alone


def test_batch_norm_is_refused() -> None:
    with pytest.raises(WrongUse, match=r"exact=8 .* \(BatchNorm2d\) needs all ranks' samples"):
        phalanx.Engine(HostileVision(), "exact=8", device="cpu")
    assert not torch.are_deterministic_algorithms_enabled()


def test_bytes_are_those_of_ordinary_sums(ranks: Ranks) -> None:
    for pair in (["dp=2,micro_batch=4", "dp=2,exact=8"], ["fsdp=2,zero=2,micro_batch=4", "fsdp=2,zero=2,exact=8"]):
        ordinary, exact = ranks(2, sent, pair)[0]
        assert ordinary <= exact < 1.01 * ordinary + 500


def sent(layouts: list[str]) -> list[int]:
    found = []
    for layout in layouts:
        with phalanx.Engine(HostileLanguage(steps=1), layout, device="cpu") as engine:
            found.append(sum(engine.step(next(engine.batches())).sent.values()))
    return found


def test_so_many_virtual_micro_batches_are_chosen() -> None:
    assert [Layout(dp=ranks).exactly(60).exact for ranks in (1, 2, 8, 16)] == [8, 8, 8, 16]
    assert Layout().exactly(6).exact == 4
    assert Layout(exact=16).exactly(60).exact == 16
