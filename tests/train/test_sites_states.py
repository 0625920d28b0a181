"""Sites that train by themselves, evaluated and taken back in the middle of a round, with a fragment on its way."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import phalanx
from phalanx.train.checkpointing import save
from phalanx.train.restoring import load
from phalanx.train.saves import Save
from tests.checkpoints import checkpointing, newest
from tests.ranks import Ranks
from tests.tasks import Digits


def evaluated_beside_a_copy(folder: str) -> None:
    """A copy of the state takes its time, while sites compute with what they have agreed on."""
    copy = Save._copy

    def slow(self: Save) -> None:
        time.sleep(0.3)
        copy(self)

    with (
        mock.patch.object(Save, "_copy", slow),
        phalanx.Engine(Digits(steps=8), "dp=2,comm=diloco:4:overlap=1", device="cpu") as engine,
        checkpointing(engine, folder) as checkpointer,
    ):
        for batch in engine.batches():
            checkpointer.before_step()
            engine.step(batch)
            if engine.just_agreed:
                break
        agreed, own = engine.whole_weights()["0.weight"].clone(), dict(engine.spread.whole.state())["0.weight"].clone()
        checkpointer.stage(save=True)
        engine.evaluate(on_batch=lambda: time.sleep(0.6))
        checkpointer.drain()
        engine.mesh.world.all_gather_words([])
        found = newest(folder)
        assert not torch.equal(agreed, own)
        assert torch.equal(found.tensor("model/0.weight"), agreed)
        assert torch.equal(found.tensor(f"sites/{engine.rank}/model/0.weight"), own)


def test_an_evaluation_waits_for_the_copy_of_what_it_exchanges(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, evaluated_beside_a_copy, str(tmp_path))


def evaluation_fails() -> list[bool]:
    """Whether a site then computes with weights of its own again."""
    with phalanx.Engine(Digits(steps=20), "dp=2,fsdp=2,zero=1,comm=diloco:8", device="cpu") as engine:
        batches = engine.batches()
        for _ in range(3):
            engine.step(next(batches))
        own = {name: value.clone() for name, value in engine.spread.whole.state()}

        def fail() -> None:
            raise RuntimeError("on every rank")

        with pytest.raises(RuntimeError, match="on every rank"):
            engine.evaluate(on_batch=fail)
        engine.spread.refresh()
        engine.spread.settle()
        return [
            torch.equal(each.full.data.view_as(own[name]), own[name]) for name, each in engine.spread.weights.items()
        ]


def test_a_site_computes_with_its_own_after_an_evaluation_that_failed(ranks: Ranks) -> None:
    assert all(all(found) for found in ranks(4, evaluation_fails))


def taken_back(comm: str, folder: str, travels: bool) -> tuple[dict[str, Tensor], list[Any]]:
    """A state taken up at the start, or by sites that have trained on, a fragment on its way; and what follows."""
    with phalanx.Engine(Digits(steps=14), f"dp=2,comm={comm}", device="cpu") as engine:
        if travels:
            for batch in engine.batches():
                engine.step(batch)
                if engine.step_number == 4:
                    save(engine, folder)
                if engine.step_number > 4 and engine.spread.outer.travelling:
                    break
            assert engine.step_number < 9
        load(engine, folder)
        rounds = [metrics.round for batch in engine.batches() if (metrics := engine.step(batch)).round]
        return dict(engine.spread.whole.state()), [(each.step, each.loss, each.count) for each in rounds]


@pytest.mark.parametrize("comm", ["diloco:4:overlap=2", "diloco:4:int4:overlap=1", "diloco:4:fragments=2:overlap=1"])
def test_what_travelled_when_a_state_was_taken_up_is_forgotten(ranks: Ranks, tmp_path: Path, comm: str) -> None:
    found = ranks(2, taken_back, comm, str(tmp_path), True)
    for (weights, rounds), (ours, told) in zip(ranks(2, taken_back, comm, str(tmp_path), False), found, strict=True):
        assert told == rounds
        assert all(torch.equal(ours[name], value) for name, value in weights.items())
