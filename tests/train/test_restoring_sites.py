"""What sites kept in the memory of their hosts, taken up by others: all go on from what all had agreed on."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

import phalanx
from phalanx.checkpoint.slot import Slot
from phalanx.train.policy import Policy
from phalanx.train.replicas import compare
from phalanx.train.restoring import Restorer
from tests.checkpoints import checkpointing, manager_at
from tests.ranks import Ranks
from tests.tasks import Digits
from tests.train.test_restoring import on_hosts

Weights = dict[str, Tensor]
BEFORE = "dp=4,comm=diloco:4:overlap=2"


def slots(folder: Path, rank: int) -> list[Slot]:
    return [Slot(os.open(folder / f"{rank} {turn}", os.O_RDWR | os.O_CREAT)) for turn in range(2)]


def kept(folder: Path, layout: str = BEFORE, hosts: str = "2,2") -> tuple[Weights, Weights, Weights]:
    """Sites on hosts keep a state; what they have agreed on, this one's own weights, and its own moments."""
    with on_hosts(hosts), phalanx.Engine(Digits(steps=20), layout, device="cpu") as engine:
        memory = {"slots": slots(folder, engine.rank), "generation": 1}
        with checkpointing(engine, folder / "files", Policy(minutes=0, memory_steps=1), **memory) as checkpointer:
            for batch in islice(engine.batches(), 4):
                checkpointer.before_step()
                found = engine.step(batch).round
            assert found is not None
            checkpointer.after_step(found.signals, last=False)
            checkpointer.drain()
        agreed = {name: value.clone() for name, value in engine.whole_weights().items()}
        return agreed, {name: value.clone() for name, value in engine.spread.whole.state()}, moments(engine)


def moments(engine: phalanx.Engine) -> Weights:
    state = engine.optimizer.state
    return {name: state[weight.shard]["exp_avg"].clone() for name, weight in engine.spread.weights.items()}


def taken_up(
    layout: str, hosts: str, memory: list[list[int]], folder: Path
) -> tuple[str | None, Weights, Weights, list[str]]:
    """From the memory of each host: where it was, what all have agreed on, then at the end; and what is said.

    ``memory``: by host, the ranks whose copies are there.
    """
    with on_hosts(hosts), phalanx.Engine(Digits(steps=20), layout, device="cpu") as engine:
        held = [slot for rank in memory[engine.environment.hosts[engine.rank]] for slot in slots(folder, rank)]
        manager = manager_at(folder / "files")
        source = Restorer(engine, manager, held, own=(), generation=2).restore()
        agreed = {name: value.clone() for name, value in engine.whole_weights().items()}
        assert engine.step_number == 4
        for batch in engine.batches():
            engine.step(batch)
        compare(engine)
        return source, agreed, dict(engine.whole_weights()), engine.changes


@pytest.mark.parametrize(
    ("layout", "hosts", "memory"),
    [
        ("dp=3,comm=diloco:4:overlap=2", "2,1", [[0, 1], [2, 3]]),
        ("dp=2,comm=local:4", "1,1", [[0, 1], [2, 3]]),
        (BEFORE, "2,2", [[2, 3], [0, 1]]),  # hosts are numbered the other way round
        ("fsdp=3", "2,1", [[0, 1], [2, 3]]),
    ],
)
def test_hosts_that_have_some_sites_each_go_on_alike(
    ranks: Ranks, tmp_path: Path, layout: str, hosts: str, memory: list[list[int]]
) -> None:
    before = ranks(4, kept, tmp_path)
    assert not torch.equal(before[0][1]["0.weight"], before[1][1]["0.weight"])
    world = phalanx.Layout.parse(layout).world
    first, *others = ranks(world, taken_up, layout, hosts, memory, tmp_path)
    for source, agreed, ended, _ in [first, *others]:
        assert source == "memory"
        assert all(torch.equal(agreed[name], value) for name, value in before[0][0].items())
        assert all(torch.equal(ended[name], value) for name, value in first[2].items())
    if world < 4:
        assert [words for words in first[3] if "some are lost, and each rank takes the mean" in words]


def test_a_host_that_has_them_all_takes_the_mean(ranks: Ranks, tmp_path: Path) -> None:
    before = [own for _, own, _ in ranks(4, kept, tmp_path)]
    source, found, _, changes = ranks(1, taken_up, "dp=1", "1", [[0, 1, 2, 3]], tmp_path)[0]
    assert source == "memory"
    for name, value in found.items():
        assert torch.allclose(value, sum(own[name] for own in before) / 4, atol=1e-7)
    assert [words for words in changes if "is averaged, and so are their weights" in words]
