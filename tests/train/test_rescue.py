"""A lost host's state, from what others hold: written to a file, and taken up under any layout."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

import pytest
import torch

import phalanx
from phalanx.train.policy import Policy
from phalanx.train.replicas import compare
from phalanx.train.rescue import coverage
from phalanx.train.restoring import Restorer
from phalanx.train.signals import Signals
from tests.checkpoint.test_owed import owed
from tests.checkpoints import checkpointing, manager_at, newest
from tests.parity import HostileLanguage
from tests.ranks import Ranks
from tests.tasks import Digits
from tests.train.test_restoring import on_hosts, opened, recalled, staged
from tests.train.test_restoring_sites import Weights, kept, moments, slots

THREE = "dp=3,comm=diloco:4:overlap=2"
LOST = {
    "shards, at the next host": ("fsdp=2", "^0 .$|at 0"),
    "a replica": ("dp=2", "^0 .$|at"),
    "another replica": ("dp=2", "^1 .$|at"),
    "a replica that owed": ("dp=2,comm=int4", "^1 .$|at"),
    "the first replica, that owed": ("dp=2,comm=onebit", "^0 .$|at"),
}
"""By what is lost: the layout, and whose copies are not there any more. A host that is new has taken its place."""


@pytest.mark.parametrize("what", LOST)
def test_a_lost_hosts_state_is_written_by_others(ranks: Ranks, what: str, tmp_path: Path) -> None:
    layout, lost = LOST[what]
    task = HostileLanguage()
    expected = ranks(2, staged, task, layout, "1,1", tmp_path)[0]
    for found, step, weights, left in ranks(2, recalled, task, layout, "1,1", tmp_path, lost):
        assert (found or "").endswith("step-00000002")
        assert step == 2
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
        assert set(left) <= {None}
    saved = newest(tmp_path / "checkpoints")
    assert not list(saved.verify())
    of_ranks = [name for name in saved.manifest.tensors if re.match("comm/owed", name)]
    assert bool(of_ranks) == ("comm" in layout)
    assert not [name for name in of_ranks if name.split("/")[2] == lost[1]]


def test_what_is_there_whole_and_of_what_a_part_is_missing(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, staged, HostileLanguage(), "fsdp=2", "1,1", tmp_path)
    copies = [slot.staged() for slot in opened([tmp_path / "0 1", tmp_path / "1 1"])]
    assert not coverage(copies)[1]
    whole, parts = coverage(copies[:1])
    assert {"model/blocks.0.attention.q_proj.weight", "optimizer/exp_avg/embedding.weight"} <= parts
    assert "counters/step/embedding.weight" in whole
    assert whole.isdisjoint(parts)


def owing(folder: Path, layout: str, held: list[list[int]] | None) -> tuple[str | None, float, list[float], list[str]]:
    """Hosts of one rank, whose memory has copies of these ranks: the source, what all owe, what each, and changes.

    None: they train and keep copies.
    """
    world = phalanx.Layout.parse(layout).world
    with on_hosts(",".join("1" * world)), phalanx.Engine(Digits(width=64, steps=20), layout, device="cpu") as engine:
        source: str | None = None
        if held is None:
            memory = {"slots": slots(folder, engine.rank), "generation": 1}
            with checkpointing(engine, folder / "files", Policy(minutes=0, memory_steps=1), **memory) as checkpointer:
                for batch in islice(engine.batches(), 3):
                    checkpointer.before_step()
                    engine.step(batch)
                    checkpointer.after_step(Signals(), last=False)
                checkpointer.drain()
        else:
            there = [slot for rank in held[engine.rank] for slot in slots(folder, rank)]
            manager = manager_at(folder / "files")
            if engine.rank == 0:
                manager.fence(2)
            engine.mesh.world.all_gather_words([])
            source = Restorer(engine, manager, there, own=(), generation=2).restore()
            assert engine.step_number == 3
        own = sum(float(bucket.coded.owed.now.double().sum()) for bucket in engine.spread.buckets)
        sums = engine.mesh.world.all_gather_words([repr(own)])
        return source, float(owed(engine).sum()), [float(words[0]) for words in sums], engine.changes


@pytest.mark.parametrize(
    ("layout", "memory", "left", "lost"),
    [
        ("dp=3,comm=int4", [[0], [1], [2]], (0, 1, 2), False),  # nobody is lost
        ("dp=3,comm=int4", [[1], [0], [2]], (0, 1, 2), False),  # likewise, numbered otherwise
        ("dp=2,comm=int4", [[0], [1]], (0, 1), True),
        ("dp=3,comm=int4", [[0], [1], []], (0, 1), True),
        ("dp=3,comm=int4", [[], [1], [2]], (1, 2), True),
    ],
)
def test_what_hosts_that_are_left_owe_is_not_lost(
    ranks: Ranks, tmp_path: Path, layout: str, memory: list[list[int]], left: tuple[int, ...], lost: bool
) -> None:
    _, total, each, _ = ranks(3, owing, tmp_path, "dp=3,comm=int4", None)[0]
    source, now, each_now, changes = ranks(len(memory), owing, tmp_path, layout, memory)[0]
    assert (source == "memory") == (memory == [[0], [1], [2]])
    assert sum(each_now) == pytest.approx(sum(each[rank] for rank in left), rel=1e-4)
    assert lost or now == pytest.approx(total, rel=1e-4)
    assert changes == (["what the hosts that are lost owed of gradients is left out"] if lost else [])


def after_a_loss(folder: Path) -> tuple[str | None, Weights, Weights, list[str]]:
    """Three hosts, the first of which is new: what all have agreed on, this site's moments, and what is said."""
    with on_hosts("1,1,1"), phalanx.Engine(Digits(steps=20), THREE, device="cpu") as engine:
        held = slots(folder, engine.rank) if engine.rank else []
        manager = manager_at(folder / "files")
        if engine.rank == 0:
            manager.fence(2)
        engine.mesh.world.all_gather_words([])
        source = Restorer(engine, manager, held, generation=2).restore()
        assert engine.step_number == 4
        agreed = {name: value.clone() for name, value in engine.whole_weights().items()}
        found = source, agreed, moments(engine), engine.changes
        for batch in engine.batches():
            engine.step(batch)
        compare(engine)
        return found


def test_a_site_that_is_replaced_at_once_costs_no_step(ranks: Ranks, tmp_path: Path) -> None:
    """Those that are left write what they have: each goes on with its own, and the new one with their mean."""
    before = ranks(3, kept, tmp_path, THREE, "1,1,1")
    for rank, (source, agreed, own, changes) in enumerate(ranks(3, after_a_loss, tmp_path)):
        assert source is not None
        assert source.endswith("step-00000004")
        assert all(torch.equal(agreed[name], value) for name, value in before[0][0].items())
        for name, moment in own.items():
            left = [before[site][2][name] for site in ((1, 2), (1,), (2,))[rank]]
            assert torch.allclose(moment, sum(left) / len(left), atol=1e-8), name
        assert not changes
