"""Bad samples are left out alike at any number of ranks, no other moves, and each is told once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import phalanx
from phalanx import WrongUse
from phalanx.data.order import Order
from phalanx.task import Task
from phalanx.train.bad_samples import note_bad_samples
from phalanx.train.certificate import in_words
from phalanx.train.evaluate import evaluate
from tests.parity import TOLERANCE
from tests.ranks import Ranks
from tests.tasks import Digits

SIZE, BATCH, STEPS = 21, 5, 7
BAD = {
    *Order(SIZE, BATCH).ids(1)[:3].tolist(),
    *Order(SIZE, BATCH).ids(2).tolist()[2:4],
    int(Order(SIZE, BATCH).ids(4)[0]),
}
"""In one step most of them, and in another, the last of its epoch, the only one."""


class Damaged:
    """Points, of which some cannot be read."""

    def __init__(self, points: Any, bad: set[int]) -> None:
        self.points, self.bad = points, bad

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise WrongUse(f"points.csv, row {index + 2}: it has 3 cells, and the first line 5. Mend that row.")
        return self.points[index]


class Points(Digits):
    def data(self) -> Any:
        return Damaged(self._points(SIZE, 0), BAD)

    def held_out(self) -> Any:
        return Damaged(self._points(13, 1), {3, 12})

    def evaluate(self, output: Any, batch: Any) -> Any:
        return {"loss": self.loss(output, batch), "y": batch["y"]}

    def summarise(self, gathered: dict[str, Any]) -> dict[str, float]:
        return {"rows": float(len(gathered["y"])), "sum": float(gathered["y"].sum())}


def a_task(**settings: Any) -> Points:
    kept: Any = {"global_batch": BATCH, "steps": STEPS, "precision": "float64", "bad_rows": "skip"} | settings
    return Points(**kept)


def by_hand() -> dict[str, Tensor]:
    """A plain loop over the samples that are left of each step."""
    task = a_task()
    with phalanx.Engine(task, device="cpu") as engine:
        begun = engine.whole_weights()
    model = task.model().double()
    model.load_state_dict(begun)
    for name, weight in model.named_parameters():
        weight.logical_name = name  # type: ignore[attr-defined]
    optimizer: Any = Task.optimizer(task, list(model.parameters()))
    data, order, schedule = task._points(SIZE, 0), Order(SIZE, BATCH), task.schedule()
    for step in range(STEPS):
        ids = [index for index in order.ids(step).tolist() if index not in BAD]
        if not ids:
            continue
        samples = [data[index] for index in ids]
        batch = {name: torch.stack([torch.as_tensor(s[name]) for s in samples]) for name in samples[0]}
        loss = task.loss(model(batch["x"].double()), batch)
        (loss.total / loss.count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        for group in optimizer.param_groups:
            group["lr"] = task.learning_rate * schedule(step)  # type: ignore[operator]
        optimizer.step()
        optimizer.zero_grad()
    return {name: weight.detach() for name, weight in model.named_parameters()}


def trained(layout: str, workers: int = 0) -> tuple[dict[str, Tensor], list[str], list[int], dict[str, float]]:
    with phalanx.Engine(a_task(workers=workers), layout, device="cpu") as engine:
        samples, told = [], list[int]()
        for batch in engine.batches():
            note_bad_samples(engine, engine.loader, batch, lambda kind, sample, **_: told.append(sample))
            samples.append(engine.step(batch).samples)
        assert engine.held_out is not None
        return engine.whole_weights(), samples, told, evaluate(engine, engine.held_out).results()


@pytest.mark.parametrize(
    ("layout", "world"), [("dp=1", 1), ("dp=3", 3), ("fsdp=2,micro_batch=1", 2), ("dp=2,fsdp=2", 4)]
)
def test_others_are_trained_on_as_by_a_plain_loop(layout: str, world: int, ranks: Ranks) -> None:
    expected = ranks(1, by_hand)[0]
    every = ranks(world, trained, layout)
    for weights, samples, _, measured in every:
        assert samples == every[0][1]
        assert measured["rows"] == 11
        for name, weight in weights.items():
            assert float((weight - expected[name]).abs().max()) < TOLERANCE, (layout, name)
    told = [found for *_, found, _ in every]
    assert {sample for found in told for sample in found} == BAD
    assert all(len(found) == len(set(found)) for found in told), "told again in the next epoch"


def test_workers_leave_out_the_same(ranks: Ranks) -> None:
    alone, reading = ranks(1, trained, "dp=1")[0], ranks(1, trained, "dp=1", 2)[0]
    assert alone[1:] == reading[1:]
    assert all(torch.equal(weight, reading[0][name]) for name, weight in alone[0].items())


def test_without_the_setting_the_first_one_ends_it_and_is_named() -> None:
    with phalanx.Engine(a_task(bad_rows="stop"), device="cpu") as engine, pytest.raises(WrongUse, match="row"):
        list(engine.batches())
    with pytest.raises(WrongUse, match="bad_rows='never' is not known"):
        a_task(bad_rows="never").check()


def test_data_of_which_nothing_can_be_read_ends_it_all_the_same() -> None:
    class Lost(Points):
        def data(self) -> Any:
            return Damaged(self._points(SIZE, 0), set(range(SIZE)))

    with phalanx.Engine(Lost(bad_rows="skip"), device="cpu") as engine, pytest.raises(WrongUse, match=r"points\.csv"):
        list(engine.batches())


def test_a_certificate_says_how_many() -> None:
    found = {
        "repeated": 0, "taken_up": 0, "left_out": [], "samples": 40, "bad_samples": [3, 9], "steps": 8, "planned": 8,
        "hash": "0" * 64,
    }  # fmt: skip
    assert "40 samples, none lost and none counted twice, 2 samples that cannot be read left out" in in_words(found)
