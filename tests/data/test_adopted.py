"""Data as people have it is taken as it is; a loader whose batches would be others is refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)
from tqdm import tqdm

import phalanx
from phalanx import WrongUse
from phalanx.data.adopted import adopted, held_out_samples, training_samples
from phalanx.data.shards import Shards
from tests.ranks import Ranks
from tests.tasks import Digits

datasets = pytest.importorskip("datasets", reason="datasets is not installed (the dev extra has it)")
tqdm.monitor_interval = 0  # or it leaves a thread behind

X = torch.randn(21, 4, generator=torch.Generator().manual_seed(3))
Y = X[:, :3].argmax(1)
PAIRS = TensorDataset(X, Y)


class Points(Dataset):
    """Map style, as people write it."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": X[index], "y": Y[index]}


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (Points()[index] for index in range(len(X)))

    def __len__(self) -> int:
        return len(X)


def named(samples: list[Any]) -> dict[str, Any]:
    return {"x": torch.stack([x for x, _ in samples]), "y": torch.stack([y for _, y in samples])}


GIVEN: dict[str, Any] = {
    "dataset": Points,
    "subset": lambda: Subset(Points(), range(21)),
    "stream": Stream,
    "loader": lambda: DataLoader(Points(), batch_size=8, shuffle=True),
    "collate_fn": lambda: DataLoader(PAIRS, batch_size=8, shuffle=True, collate_fn=named),
    "stream in a loader": lambda: DataLoader(Stream(), batch_size=8),
    "hugging face": lambda: datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()}),
}


class Given(Digits):
    """Digits on what people return."""

    kind = ""

    def data(self) -> Any:
        return GIVEN[self.kind]()

    def held_out(self) -> Any:
        return GIVEN[self.kind]()


def task_of(kind: str) -> Given:
    return type("Given", (Given,), {"kind": kind})(global_batch=8, precision="float64")


def trained(kind: str) -> tuple[dict[str, torch.Tensor], dict[str, float], str]:
    with phalanx.Engine(task_of(kind), device="cpu") as engine:
        samples = [engine.step(batch).samples for batch in engine.batches()]
        return engine.whole_weights(), engine.evaluate(), samples[0]


@pytest.mark.parametrize("kind", GIVEN)
def test_what_people_return_trains_the_same_on_any_number_of_ranks(kind: str, ranks: Ranks) -> None:
    (alone, measured, samples), *_ = ranks(1, trained, kind)
    for weights, held_out, found in ranks(3, trained, kind):
        assert found == samples
        assert held_out["loss"] == pytest.approx(measured["loss"], abs=1e-12)
        for name, weight in weights.items():
            assert torch.allclose(weight, alone[name], rtol=0, atol=1e-12), (kind, name)
    if "stream" not in kind:  # which has an order of its own
        reference = ranks(1, trained, "dataset")[0][0]
        for name, weight in alone.items():
            assert torch.allclose(weight, reference[name], rtol=0, atol=1e-7 if kind == "hugging face" else 1e-12)


def refusal(loader: DataLoader[Any], method: str = "data", task: phalanx.Task | None = None) -> str:
    with pytest.raises(WrongUse) as refused:
        adopted(loader, task or Digits(global_batch=8), method)
    return str(refused.value)


def test_a_loader_with_an_order_or_batches_of_its_own_is_refused() -> None:
    def loader(**options: Any) -> DataLoader[Any]:
        return DataLoader(Points(), **({"batch_size": 8, "shuffle": True} | options))

    weighted = WeightedRandomSampler([1.0] * 21, 21)
    assert "Give the task sample_weights(self, data)" in refusal(loader(shuffle=None, sampler=weighted))
    again = RandomSampler(Points(), replacement=True)
    assert "sampler=RandomSampler" in refusal(loader(shuffle=None, sampler=again))
    batches = DataLoader(Points(), batch_sampler=BatchSampler(SequentialSampler(Points()), 8, drop_last=False))
    assert "batch_sampler=BatchSampler" in refusal(batches)
    assert "shuffle=False" in refusal(loader(shuffle=False))
    assert "Set global_batch=4" in refusal(loader(batch_size=4))
    assert "drop_last=True, and the task has last_batch=keep. Set last_batch=drop" in refusal(loader(drop_last=True))
    adopted(loader(drop_last=True), Digits(global_batch=8, last_batch="drop"), "data")
    assert "worker_init_fn" in refusal(loader(num_workers=1, worker_init_fn=print))
    assert "sampler=WeightedRandomSampler" in refusal(loader(shuffle=None, sampler=weighted), "held_out")
    adopted(loader(shuffle=False, batch_size=2, drop_last=True), Digits(global_batch=8), "held_out")
    adopted(loader(batch_size=4), Digits(global_batch=8), "data", checked=False)


def test_what_a_loader_has_and_is_not_taken_is_said() -> None:
    found = adopted(DataLoader(Points(), batch_size=8, shuffle=True, num_workers=2), Digits(global_batch=8), "data")
    assert found.notes == ["num_workers=2 of the DataLoader is not taken; set workers=2"]


def test_two_ways_to_collate_and_batches_without_names_are_refused() -> None:
    class Collates(Digits):
        def collate(self, samples: Any) -> dict[str, Any]:
            return named(samples)

    loader = DataLoader(PAIRS, batch_size=8, shuffle=True, collate_fn=named)
    assert "has a collate() too" in refusal(loader, task=Collates(global_batch=8))
    nameless = DataLoader(PAIRS, batch_size=8, shuffle=True, collate_fn=lambda pairs: [*zip(*pairs, strict=True)])
    found = adopted(nameless, Digits(global_batch=8), "data")
    with pytest.raises(WrongUse, match=r"collate_fn of Digits.data returned .* not a dict"):
        found.collate_fn([found[0], found[1]])


def test_the_rest_is_as_it_was() -> None:
    assert isinstance(training_samples(task_of("stream")), Shards)
    assert held_out_samples(Digits()) is not None
    formatted = datasets.Dataset.from_dict({"x": X.tolist()}).with_format("numpy")
    assert adopted(formatted, Digits(), "data") is formatted
