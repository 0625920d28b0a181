"""What sites have agreed on and what is their own, in checkpoints: to the same bits, and under other layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import phalanx
from phalanx.checkpoint.manifest import Held, Manifest
from phalanx.checkpoint.sites import MeanOfSites, Taken, common
from phalanx.checkpoint.state import State
from phalanx.train.checkpointing import save
from phalanx.train.restoring import load
from tests.checkpoints import manager_at
from tests.ranks import Ranks
from tests.tasks import Digits

HALF = 4
Told = tuple[list[float], dict[str, Tensor], dict[str, Tensor]]


def state(engine: phalanx.Engine) -> dict[str, Tensor]:
    """What this rank has of the optimizer's first moments, and of the outer one's."""
    outer = engine.spread.outer
    found = {f"outer {n}": v.clone() for n, v in outer.velocity.items()} if outer else {}
    held = engine.optimizer.state
    return found | {n: held[w.shard]["exp_avg"].clone() for n, w in engine.spread.weights.items() if w.trainable}


def run(layout: str, folder: str, resume: bool) -> Told:
    """Losses from the half on, what a rank had there, and the weights at the end."""
    with phalanx.Engine(Digits(width=64, steps=10), layout, device="cpu") as engine:
        if resume:
            load(engine, folder)
            at_half = state(engine)
        losses = []
        for batch in engine.batches():
            if engine.step_number == HALF and not resume:
                save(engine, folder)
                at_half = state(engine)
            loss = engine.step(batch).loss
            losses += [loss] if engine.step_number > HALF else []
        return losses, at_half, engine.whole_weights()


SAME = (
    "dp=2,comm=local:2", "dp=2,fsdp=2,comm=diloco:4:int8", "dp=2,comm=diloco:4:fragments=2:overlap=1",
    "dp=2,pp=2,comm=diloco:2",
)  # fmt: skip


@pytest.mark.parametrize("layout", SAME)
def test_a_run_goes_on_to_the_same_bits(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    world = phalanx.Layout.parse(layout).world
    through = ranks(world, run, layout, str(tmp_path), False)
    for before, after in zip(through, ranks(world, run, layout, str(tmp_path), True), strict=True):
        assert after[0] == before[0]
        for found, want in zip(after[1:], before[1:], strict=True):
            assert found.keys() == want.keys()
            assert all(torch.equal(found[name], want[name]) for name in want)


@pytest.mark.parametrize("after", ["dp=3,comm=diloco:2", "dp=1", "fsdp=2", "dp=2,fsdp=2,comm=local:4"])
def test_other_layouts_go_on_with_the_mean(ranks: Ranks, tmp_path: Path, after: str) -> None:
    before = ranks(2, run, "dp=2,comm=diloco:4", str(tmp_path), False)
    moments = {name: (before[0][1][name] + before[1][1][name]) / 2 for name in before[0][1]}
    sites = after.startswith("dp=2")  # as many as there were: each goes on with its own
    for rank, (losses, found, _) in enumerate(
        ranks(phalanx.Layout.parse(after).world, run, after, str(tmp_path), True)
    ):
        assert losses[-1] < 2.4
        for name, moment in moments.items():
            if name in found and found[name].shape == moment.shape:
                assert torch.allclose(found[name], before[rank // 2][1][name] if sites else moment, atol=1e-7)


APART = "dp=2,comm=diloco:4:fragments=2:overlap=1"
Weights = dict[str, Tensor]


def apart(folder: str) -> tuple[Weights, Weights]:
    """Where sites agree, but each has trained on from what left before: its own weights, and those agreed on."""
    with phalanx.Engine(Digits(width=64, steps=10), APART, device="cpu") as engine:
        for batch in engine.batches():
            if engine.step_number == HALF:
                save(engine, folder)
                break
            engine.step(batch)
        own = {name: tensor.clone() for name, tensor in engine.spread.whole.state()}
        return own, {name: tensor.clone() for name, tensor in engine.whole_weights().items()}


def taken_up(layout: str, folder: str) -> tuple[Weights, Weights, list[float]]:
    """What a rank computes with and all have agreed on, and what its site has yet to tell; then it goes on."""
    with phalanx.Engine(Digits(width=64, steps=10), layout, device="cpu") as engine:
        load(engine, folder)
        own = {name: tensor.clone() for name, tensor in engine.spread.whole.state()}
        agreed = {name: tensor.clone() for name, tensor in engine.whole_weights().items()}
        outer = engine.spread.outer
        untold = [*outer.untold] if outer is not None else []
        assert all(engine.step(batch).loss < 2.4 for batch in engine.batches())
        return own, agreed, untold


@pytest.mark.parametrize(
    "after",
    ["dp=3,comm=diloco:2", "dp=3,comm=diloco:4:fragments=2:overlap=1", "dp=1", "fsdp=2", "dp=2,comm=diloco:4",
     "dp=2,fsdp=2,comm=local:4"],
)  # fmt: skip
def test_what_sites_trained_since_goes_on_in_the_mean(ranks: Ranks, tmp_path: Path, after: str) -> None:
    (one, agreed), (other, _) = ranks(2, apart, str(tmp_path))
    assert not torch.equal(one["0.weight"], other["0.weight"])
    world = phalanx.Layout.parse(after).world
    for own, found, _ in ranks(world, taken_up, after, str(tmp_path)):
        for name, value in one.items():
            mean = (value + other[name]) / 2
            assert torch.allclose(own[name], mean, atol=1e-7), name
            assert torch.allclose(found[name], mean, atol=1e-7), name
        assert not torch.allclose(own["0.weight"], agreed["0.weight"], atol=1e-7)


@pytest.mark.parametrize("before", ["dp=2", "fsdp=2", "dp=2,comm=int4", "dp=1"])
@pytest.mark.parametrize("after", [APART, "dp=2,comm=local:4:overlap=1"])
def test_what_no_sites_had_is_what_all_sites_go_on_with(ranks: Ranks, tmp_path: Path, before: str, after: str) -> None:
    world = phalanx.Layout.parse(before).world
    ranks(world, run, before, str(tmp_path), False)
    (saved, _, _), *_ = ranks(1, taken_up, "dp=1", str(tmp_path))
    for own, agreed, _ in ranks(2, taken_up, after, str(tmp_path)):
        for name, value in saved.items():
            assert torch.equal(own[name], value), name
            assert torch.equal(agreed[name], value), name


def test_as_many_sites_go_on_with_their_own(ranks: Ranks, tmp_path: Path) -> None:
    before = ranks(2, apart, str(tmp_path))
    for (own, agreed), (mine, found, _) in zip(before, ranks(2, taken_up, APART, str(tmp_path)), strict=True):
        assert all(torch.equal(mine[name], value) for name, value in own.items())
        assert all(torch.equal(found[name], value) for name, value in agreed.items())


def early(folder: str) -> None:
    with phalanx.Engine(Digits(width=64), "dp=2,comm=local:4", device="cpu") as engine:
        engine.step(next(engine.batches()))
        save(engine, folder)


def test_no_state_is_taken_in_between(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"Save when engine\.just_agreed"):
        ranks(2, early, str(tmp_path))


def test_whose_is_taken_up() -> None:
    names = ["model/w", "sites/0/optimizer/exp_avg/w", "sites/2/optimizer/exp_avg/w", "sites/2/counters/step/w"]
    manifest = Manifest({"layout": "dp=3,comm=local:2"}, dict.fromkeys(names, Held("float32", (2,))))
    assert Taken.of(manifest, "sites/2/", 3).whose == ("sites/2/",)
    assert Taken.of(manifest, "sites/1/", 3).whose == Taken.of(manifest, "", 1).whose == ("sites/0/", "sites/2/")
    kept = Taken.of(manifest, "sites/0/", 3).kept(manifest)
    assert kept == {"w": {("optimizer", "exp_avg"): ["sites/0/optimizer/exp_avg/w"]}}
    none = Taken.of(Manifest({}, {"optimizer/exp_avg/w": Held("float32", (2,))}), "sites/0/", 2)
    assert (none.whose, none.weights(True), none.own) == (("",), (), "")


@pytest.mark.parametrize(
    ("layout", "own", "sites", "apart", "want"),
    [
        ("dp=2,comm=local:2", "sites/1/", 2, True, ("sites/1/",)),
        ("dp=2,comm=local:2", "sites/1/", 2, False, ("sites/0/", "sites/1/")),
        ("dp=2,comm=local:2", "sites/1/", 3, True, ("sites/0/", "sites/1/")),
        ("dp=3,comm=local:2", "sites/1/", 2, True, ()),  # of some alone the mean is nothing that others have too
        ("dp=3,comm=local:2", "", 1, False, ()),
    ],
)
def test_whose_weights_are_taken_up(layout: str, own: str, sites: int, apart: bool, want: tuple[str, ...]) -> None:
    saved = dict.fromkeys(["model/w", "sites/0/model/w", "sites/1/model/w"], Held("float32", (2,)))
    assert Taken.of(Manifest({"layout": layout}, saved), own, sites).weights(apart) == want
    assert common("sites/0/optimizer/exp_avg/w") == common("optimizer/exp_avg/w") == "optimizer/exp_avg/w"


@pytest.mark.parametrize(
    ("there", "whose", "sites", "here", "want"),
    [
        ([0, 1, 2], "sites/1/", 3, 1, 10.0),  # its own
        ([0, 1, 2], "sites/1/", 2, 1, 55.5),  # of files, in which all are: two take half each
        ([2], "sites/1/", 2, 1, 100.0),  # of the memory of its host, where it was the third one
        ([0, 1], "sites/1/", 3, 2, 5.5),  # of the memory of a host of two, another host having lost its own
        ([2], "sites/1/", 4, 2, 50.0),  # of one of three, where a host has two of four now
    ],
)
def test_what_is_untold_is_told_once(there: list[int], whose: str, sites: int, here: int, want: float) -> None:
    numbers = {f"sites/{site}/untold": [10.0**site] for site in there}
    saved = Manifest({"layout": "dp=4,comm=local:2" if len(there) == 2 else "dp=3,comm=local:2"}, {}, numbers)
    assert Taken.of(saved, whose, sites).untold(saved, here) == [want]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_counters_are_not_averaged(dtype: torch.dtype) -> None:
    steps, moments = torch.ones((), dtype=dtype), torch.ones(2, dtype=dtype)
    for room, counters, values in ((steps, True, (3.0, 5.0, 4.0)), (moments, False, (0.0, 1.0, 1 / 128, 1.0))):
        joined = MeanOfSites(room, len(values), counters)
        for value in values:
            joined.join(joined.total, torch.full_like(joined.total, value))
        joined.settle()
    assert steps == 5
    assert torch.equal(moments, torch.full((2,), 2.0078125 / 4).to(dtype)), "added up in a wide type"


def test_sites_are_read_into_the_memory_of_one(ranks: Ranks, tmp_path: Path) -> None:
    ranks(3, run, "dp=3,comm=local:4", str(tmp_path), False)
    with phalanx.Engine(Digits(width=64, steps=10), "dp=1", device="cpu") as engine:
        wanted = State(engine.spread, engine.optimizer).wanted(manager_at(tmp_path).open(HALF).manifest)
    names = [name for name in wanted if name.endswith("optimizer/exp_avg/0.weight")]
    assert len(names) == 3
    assert len({wanted[name][0][1].data_ptr() for name in names}) == 1
