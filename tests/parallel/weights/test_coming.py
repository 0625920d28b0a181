"""Weights that stay whole come while the next step begins: whoever reads one sees all of the update."""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import phalanx
from phalanx.parallel.weights import bucket as buckets
from phalanx.parallel.weights.bucket import Bucket
from phalanx.parallel.weights.coming import Arrival, ComingWeight
from phalanx.train import replicas
from tests.layouts import every_layout, task_for
from tests.parity import HostileLanguage, Mixture
from tests.ranks import RankFailed, Ranks

LAYOUTS = {
    "fsdp=2,zero=1": 2,
    "fsdp=2,zero=2,micro_batch=1": 2,
    "dp=2,fsdp=2,zero=2,recompute=full": 4,
    "fsdp=2,cp=2,zero=1": 4,
    "fsdp=2,tp=2,zero=2": 4,
    "fsdp=2,pp=2,zero=1,micro_batch=2": 4,
    "fsdp=2,pp=2,zero=2,micro_batch=2,schedule=zb,recompute=full": 4,
    "fsdp=2,zero=2,offload=optimizer": 2,
    "fsdp=2,zero=2,comm=int8": 2,
    "fsdp=2,zero=1,exact=4": 2,
}


@contextmanager
def small_buckets(late: float = 0.0) -> Iterator[None]:
    """Several in a small model; ``late``: seconds before the last rank sends its part of each."""
    start = Bucket.start_gather

    def start_late(self: Bucket) -> None:
        if not self.is_whole and not self.is_coming and dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(late)
        start(self)

    with (
        mock.patch.object(buckets, "BUCKET_BYTES", 1 << 12),
        mock.patch.object(Bucket, "start_gather", start_late if late else start),
    ):
        yield


def trained(task: phalanx.Task, layout: str, waits: bool) -> tuple[list[Any], dict[str, Tensor], int]:
    """Losses and bytes sent; weights; how many buckets were on their way after a step. ``waits``: for all of them."""
    told, most = [], 0
    with small_buckets(), phalanx.Engine(task, layout, device="cpu") as engine:
        for batch in engine.batches():
            metrics = engine.step(batch)
            most = max(most, len(engine.spread.coming.on_their_way))
            if waits:
                engine.spread.settle()
            told.append((metrics.loss, metrics.grad_norm, metrics.sent))
        return told, {name: weight.clone() for name, weight in engine.whole_weights().items()}, most


def both(task: phalanx.Task, layout: str) -> int:
    came, weights, most = trained(task, layout, waits=False)
    waited, others, _ = trained(task, layout, waits=True)
    assert came == waited
    for name, weight in weights.items():
        assert torch.equal(weight, others[name]), name
    return most


@pytest.mark.parametrize(("layout", "world"), LAYOUTS.items())
def test_steps_that_wait_for_nothing_are_the_same_bits(ranks: Ranks, layout: str, world: int) -> None:
    assert min(ranks(world, both, HostileLanguage(), layout)) > 2


@pytest.mark.every
@pytest.mark.parametrize(("world", "experts"), [(2, False), (4, False), (4, True)])
def test_so_they_are_under_every_layout(ranks: Ranks, world: int, experts: bool) -> None:
    kept_whole = [each for each in every_layout(world, experts=experts) if each.zero < 3 and each.fsdp * each.cp > 1]
    assert len(kept_whole) > 2
    for layout in kept_whole:
        ranks(world, both, task_for(layout), str(layout))


@dataclass
class Frozen(HostileLanguage):
    def model(self) -> nn.Module:
        model = super().model()
        model.blocks[0].requires_grad_(False)
        return model


def test_frozen_weights_come_with_the_others(ranks: Ranks) -> None:
    for precision in ("float64", "bf16"):
        assert min(ranks(2, both, Frozen(precision=precision), "fsdp=2,zero=2")) > 1


def test_experts_come_from_those_that_hold_them(ranks: Ranks) -> None:
    assert min(ranks(4, both, Mixture(), "fsdp=4,ep=2,zero=1")) > 2


READERS = {
    "detach": lambda weight: weight.detach(),
    "data": lambda weight: weight.data,
    "numpy": lambda weight: torch.from_numpy(weight.detach().numpy()),
    "sum of a list": lambda weight: torch.stack([weight])[0].detach(),
    "deepcopy": lambda weight: copy.deepcopy(weight).detach(),
    "saved": lambda weight: _saved(weight.data),
    "address": lambda weight: (weight.data_ptr(), weight)[1].detach(),
    "product": lambda weight: nn.functional.linear(torch.eye(weight.shape[1], dtype=weight.dtype), weight).T.detach(),
}


@dataclass
class Long(HostileLanguage):
    steps: int = len(READERS)


def _saved(weight: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def read() -> list[str]:
    """By whom a weight is read wrong after a step, while it is on its way."""
    wrong = []
    with small_buckets(late=0.05), phalanx.Engine(Long(), "fsdp=2,zero=1", device="cpu") as engine:
        name, kept = next((n, p) for n, p in engine.model.named_parameters() if "blocks" in n and p.dim() == 2)
        batches = engine.batches()
        for reader, function in READERS.items():
            before = kept.detach().clone()
            engine.step(next(batches))
            assert type(kept) is ComingWeight, "there already: nothing is tried"
            assert kept.shape == before.shape
            assert kept.requires_grad
            assert isinstance(kept, nn.Parameter)
            seen = function(kept).clone()
            assert type(kept) is nn.Parameter
            assert "arrival" not in vars(kept)
            if torch.equal(seen, before) or not torch.equal(seen, engine.whole_weights()[name]):
                wrong.append(reader)
    return wrong


def own_rows() -> list[bool]:
    """Rows that this rank owns are written while the last update is on its way, and stay written."""
    with small_buckets(late=0.05), phalanx.Engine(Long(), "fsdp=2,zero=1", device="cpu") as engine:
        engine.step(next(engine.batches()))
        coming = [type(weight.shard) is ComingWeight for weight in engine.spread.weights.values()]
        replicas.compare(engine)
        for weight in engine.spread.weights.values():
            with torch.no_grad():
                weight.shard.fill_(7.0)
        engine.spread.updated()
        return [any(coming), *(bool((weight.full == 7).all()) for weight in engine.spread.weights.values())]


def test_whoever_reads_a_weight_waits_for_it(ranks: Ranks) -> None:
    assert ranks(2, read) == [[], []]


def test_what_is_written_to_rows_meanwhile_is_not_lost(ranks: Ranks) -> None:
    assert all(map(all, ranks(2, own_rows)))


class Branches(nn.Module):
    """Which of its parts it uses depends on the samples, and ranks speak to each other in between."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.left, self.right = nn.BatchNorm1d(8), nn.Linear(8, 64), nn.Linear(8, 64)
        self.between, self.head = nn.BatchNorm1d(64), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        part = self.left if float(x[0, 0]) > 0 else self.right
        return self.head(self.between(part(self.norm(x)))).squeeze(-1)


@dataclass
class Choosing(phalanx.Task):
    global_batch: int = 8
    steps: int = 4
    precision: Any = "float64"

    def model(self) -> nn.Module:
        return Branches()

    def data(self) -> Any:
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(3))
        return [{"x": row, "y": row.sum()} for row in x]

    def inputs(self, batch: Any) -> Tensor:
        return batch["x"]

    def loss(self, output: Tensor, batch: Any) -> phalanx.Loss:
        return phalanx.Loss(((output - batch["y"]) ** 2).sum(), len(output))


def branching(waits: bool) -> list[Any]:
    with mock.patch.object(buckets, "BUCKET_BYTES", 1):
        told, weights, _ = trained(Choosing(), "fsdp=2,zero=1", waits)
    return [told, {name: weight.tolist() for name, weight in weights.items()}]


def test_ranks_whose_data_makes_them_use_other_modules_wait_for_nobody_in_vain(ranks: Ranks) -> None:
    assert ranks(2, branching, False) == ranks(2, branching, True)


def order() -> list[list[int]]:
    """Buckets as they are waited for in a step, by the place of their first weight."""
    found: list[list[int]] = []
    need = Arrival.need

    def noted(self: Arrival) -> None:
        if self._pending is not None:
            found[-1].append(min(names.index(weight.name) for weight in self.bucket.weights))
        need(self)

    with small_buckets(), phalanx.Engine(HostileLanguage(), "fsdp=2,zero=2", device="cpu") as engine:
        names = [*engine.spread.weights]
        with mock.patch.object(Arrival, "need", noted):
            for batch in engine.batches():
                found.append([])
                engine.step(batch)
        engine.spread.settle()
    return found


def test_forward_waits_for_one_bucket_after_another(ranks: Ranks) -> None:
    first, *others = ranks(2, order)[0]
    assert not first
    assert all(len(each) > 2 and each == sorted(each) for each in others)


def failing() -> None:
    with small_buckets(), phalanx.Engine(HostileLanguage(), "fsdp=2,zero=1", device="cpu") as engine:
        batches = engine.batches()
        engine.step(next(batches))
        with mock.patch.object(Bucket, "finish_gather", side_effect=RuntimeError("the link is gone")):
            engine.step(next(batches))
            engine.step(next(batches))


def test_what_fails_on_the_way_is_told_to_who_waits(ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match="the link is gone"):
        ranks(2, failing)
