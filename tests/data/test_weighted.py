"""Weighted and balanced draws: how often each sample comes, and the same whoever draws, from any step on."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import phalanx
from phalanx import WrongUse
from phalanx.data import Arrays, ByLength, Mixture
from phalanx.data.loader import Loader
from phalanx.data.order import Order
from phalanx.data.planned import order_of, training_order
from phalanx.data.weighted import BalancedOrder, WeightedOrder, balanced, weighted
from phalanx.task import Task
from tests.ranks import Ranks
from tests.tasks import Digits

WEIGHTS = [0.0, 1.0, 2.0, 0.5, 0.0, 6.0, 1.0, 3.0, 0.5, 1.0, 0.0]
CLASSES = np.array([0] * 40 + [7] * 3 + [2] * 17 + [5])


def by_weight(batch: int = 4, seed: int = 1, **options: Any) -> WeightedOrder:
    return weighted(Order(len(WEIGHTS), batch, seed, **options), WEIGHTS, "weights")


def by_class(batch: int = 8, seed: int = 1, **options: Any) -> BalancedOrder:
    return balanced(Order(len(CLASSES), batch, seed, **options), CLASSES, "y")


def drawn(order: Order, steps: int, start: int = 0) -> np.ndarray:
    return np.concatenate([order.ids(step) for step in range(start, start + steps)])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_samples_come_in_proportion_to_their_weights(seed: int) -> None:
    draws = 44_000
    found = np.bincount(drawn(by_weight(seed=seed), draws // 11 * 3), minlength=len(WEIGHTS))
    wanted = np.array(WEIGHTS) / sum(WEIGHTS) * found.sum()
    assert found.sum() == draws
    assert not found[wanted == 0].any(), "a sample of weight 0 was drawn"
    some = wanted > 0
    chi = ((found - wanted)[some] ** 2 / wanted[some]).sum()
    assert chi < 30  # 7 degrees of freedom: 1e-4


@pytest.mark.parametrize("seed", [0, 1])
def test_draws_are_independent(seed: int) -> None:
    """Pairs of neighbours are as frequent as the product of their probabilities says."""
    order = weighted(Order(3, 2, seed), [1.0, 2.0, 3.0], "weights")
    found = drawn(order, 20_000)
    pairs = Counter(zip(found[:-1:2].tolist(), found[1::2].tolist(), strict=True))
    count, chances = sum(pairs.values()), np.array([1, 2, 3]) / 6
    wanted = {(a, b): count * chances[a] * chances[b] for a in range(3) for b in range(3)}
    assert sum((pairs[pair] - want) ** 2 / want for pair, want in wanted.items()) < 33  # 8 degrees of freedom: 1e-4


def test_an_epoch_has_as_many_draws_as_samples_and_its_own() -> None:
    order = by_weight()
    assert (order.steps_per_epoch, [order.slots(step) for step in range(4)]) == (3, [4, 4, 3, 4])
    assert drawn(order, 3).tolist() != drawn(order, 3, start=3).tolist()
    assert drawn(order, 3).tolist() != drawn(by_weight(seed=2), 3).tolist()
    assert (order.ids(10**9, 1, 3) == order.ids(10**9)[1:3]).all()
    dropped, merged = by_weight(last_batch="drop"), by_weight(last_batch="merge")
    assert [dropped.slots(step) for step in range(3)] == [4, 4, 4]
    assert [merged.slots(step) for step in range(3)] == [4, 7, 4]
    assert drawn(merged, 2).tolist() == drawn(order, 3).tolist()


@pytest.mark.parametrize("last_batch", ["keep", "drop", "merge"])
@pytest.mark.parametrize("seed", [0, 1])
def test_classes_come_equally_often_and_no_sample_before_all_of_its_class(seed: int, last_batch: str) -> None:
    order = by_class(seed=seed, last_batch=last_batch)
    found = drawn(order, 60)
    for stop in range(4, len(found), 4):
        assert set(Counter(CLASSES[found[:stop]].tolist()).values()) == {stop // 4}, "in each round each class comes"
    for kind in np.unique(CLASSES):
        of_class = [int(i) for i in found if CLASSES[i] == kind]
        size = int((kind == CLASSES).sum())
        for first in range(0, len(of_class) - size + 1, size):
            assert len(set(of_class[first : first + size])) == size
    shuffled = [CLASSES[found[first : first + 4]].tolist() for first in range(0, 40, 4)]
    assert len({tuple(kinds) for kinds in shuffled}) > 3, "classes come in the same order in every round"


def test_samples_of_a_class_come_alike() -> None:
    order = by_class()
    size = 17
    hits = np.zeros((size, size))
    inside = np.flatnonzero(CLASSES == 2)
    found = [int(i) for i in drawn(order, 30_000) if CLASSES[i] == 2]
    rounds = len(found) // size
    for number in range(rounds):
        for place, sample in enumerate(found[number * size : (number + 1) * size]):
            hits[place, np.searchsorted(inside, sample)] += 1
    expected = rounds / size
    assert ((hits - expected) ** 2 / expected).sum() < 350  # 256 degrees of freedom: 1e-4


def test_they_are_told_in_words() -> None:
    every = weighted(Order(1000, 10), np.ones(1000), "weights")
    assert "about 63% of samples are seen in an epoch" in every.describe()
    found = drawn(every, 100)
    assert abs(len(set(found.tolist())) / 1000 - 0.632) < 0.05
    told = by_class().describe()
    assert "4 classes of 'y' equally often" in told
    assert "largest (40) 0.381 times an epoch" in told
    assert "smallest (1) 15.2 times" in told


@pytest.mark.parametrize("order", [by_weight(), by_weight(last_batch="drop"), by_class()], ids=str)
def test_they_read_back_from_their_facts(order: Order) -> None:
    facts = json.loads(json.dumps(order.facts()))
    other = by_class() if isinstance(order, BalancedOrder) else by_weight()
    size, batch = order.size, order.global_batch
    found = order_of(facts, size, batch, 1, lambda: other)
    assert found == order
    assert found is not None
    assert drawn(found, 9).tolist() == drawn(order, 9).tolist()
    changed = weighted(Order(size, batch, 1), np.arange(1, size + 1), "weights")
    assert order_of(facts, size, batch, 1, lambda: changed) is None


class Noisy:
    """Samples that draw."""

    def __len__(self) -> int:
        return len(WEIGHTS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "noise": float(np.random.rand())}


def read(ranks: int, rank: int, start: int = 0) -> list[tuple[int, int, float]]:
    loader = Loader(Noisy(), Task().collate, by_weight(), micro_batches=2, ranks=ranks, rank=rank, plain=True)
    return [
        (batch.step, int(number), float(noise))
        for batch in loader.batches(start, 6)
        for micro in batch.micro_batches
        if micro.real
        for number, noise in zip(micro.tensors["id"], micro.tensors["noise"], strict=True)
    ]


def test_any_number_of_ranks_reads_the_same_and_each_visit_draws_anew() -> None:
    whole = read(1, 0)
    for ranks in (2, 3):
        assert sorted(item for rank in range(ranks) for item in read(ranks, rank)) == sorted(whole)
    assert read(1, 0, start=4) == [item for item in whole if item[0] >= 4]
    assert len({noise for _, _, noise in whole}) == len(whole), "a sample that comes twice is augmented alike"


@dataclass
class Drawn(Digits):
    precision: str = "float64"
    steps: int = 8
    last_batch: str = "drop"
    samples: int = 29
    by: str = "weights"

    def __post_init__(self) -> None:
        self.balance = "y" if self.by == "classes" else ""

    def sample_weights(self, data: Any) -> Any:
        return 1.0 + 5.0 * (data.columns["y"] == 0) if self.by == "weights" else None


def trained(layout: str, by: str, start: int = 0) -> tuple[list[str], dict[str, torch.Tensor]]:
    with phalanx.Engine(Drawn(by=by), layout, device="cpu") as engine:
        engine.step_number = start
        found = [engine.step(batch).samples for batch in engine.batches()]
        return found, {name: tensor.clone() for name, tensor in engine.whole_weights().items()}


def by_hand(by: str) -> dict[str, torch.Tensor]:
    """The same task, trained by a plain loop on one device on the samples that the order says."""
    task = Drawn(by=by)
    with phalanx.Engine(task, "dp=1", device="cpu") as engine:
        begins = {name: tensor.clone() for name, tensor in engine.whole_weights().items()}
    model = task.model().double()
    model.load_state_dict(begins)
    params = list(model.parameters())
    optimizer, schedule = task.optimizer(params), task.schedule()
    data = task.data()
    order = training_order(task, data)
    for step in range(task.steps):
        batch = data.batch(order.ids(step))
        loss = torch.nn.functional.cross_entropy(model(batch["x"].double()), batch["y"])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, task.clip)
        for group in optimizer.param_groups:
            group["lr"] = task.learning_rate * schedule(step)
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize("by", ["weights", "classes"])
def test_a_task_trains_alike_at_any_number_of_ranks(ranks: Ranks, by: str) -> None:
    wanted = by_hand(by)
    for found, weights in [ranks(1, trained, "dp=1", by)[0], *ranks(2, trained, "fsdp=2", by)]:
        assert found == trained("dp=1", by)[0]
        for name, want in wanted.items():
            assert torch.allclose(weights[name], want, rtol=1e-9, atol=1e-12), name
    assert ranks(2, trained, "dp=2", by, 5)[0][0] == trained("dp=1", by)[0][5:]


def refusal(task: Task, data: Any) -> str:
    with pytest.raises(WrongUse) as refused:
        training_order(task, data)
    return str(refused.value)


def test_what_cannot_be_drawn_is_refused() -> None:
    points = Drawn().data()
    order = Order(29, 8)
    for weights, why in [
        ([1.0, 2.0], "shape (2,) for 29 samples"), ([-1.0] * 29, "draw nothing"), ([0.0] * 29, "draw nothing"),
        ([float("nan")] * 29, "draw nothing"), (["a"] * 29, "no numbers"),
    ]:  # fmt: skip
        with pytest.raises(WrongUse, match=why.replace("(", r"\(").replace(")", r"\)")):
            weighted(order, weights, "Mine.sample_weights()")
    with pytest.raises(WrongUse, match="real numbers, which are no classes"):
        balanced(order, torch.rand(29), "x")
    assert "both say how often" in refusal(_with_both(), points)
    lengths = ByLength(points, [3] * 29)
    assert "sample_weights() is not for a ByLength, which has an order of its own (LengthOrder)" in refusal(
        Drawn(), lengths
    )
    sources = Mixture({"one": points})
    assert "balance=y is not for a Mixture" in refusal(Drawn(by="classes", last_batch="keep"), sources)
    assert "last_batch=drop is not for a Mixture" in refusal(Drawn(), sources)
    assert "balance=y needs the classes of all samples" in refusal(Drawn(by="classes"), Streamlike())


def _with_both() -> Task:
    task = Drawn()
    task.balance = "y"
    return task


class Streamlike:
    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"y": index % 3}


def test_a_number_of_that_name_is_the_tasks_own() -> None:
    @dataclass
    class Experts(Digits):
        balance: float = 0.01  # type: ignore[assignment]

    task = Experts()
    assert type(training_order(task, task.data())) is Order


def test_arrays_of_text_are_classes() -> None:
    data = Arrays(x=np.arange(6), kind=np.array(["a", "b", "b", "b", "b", "b"]))
    task = Digits(global_batch=2, balance="kind")
    found = drawn(training_order(task, data), 30)
    assert (found == 0).sum() == 30
