"""What is owed of gradients, in checkpoints: all of it, under any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import phalanx
from phalanx.train.checkpointing import save
from phalanx.train.restoring import load
from tests.ranks import Ranks
from tests.tasks import Digits

HALF = 3


def owed(engine: phalanx.Engine) -> torch.Tensor:
    """All that ranks owe, by weight, over all ranks."""
    total = []
    for name, weight in engine.spread.weights.items():
        own = torch.zeros(weight.shape, dtype=torch.float64)
        for bucket in engine.spread.buckets:
            coded = bucket.coded
            if coded is None or coded.owed is None:
                continue
            for each, rows, view in coded.pieces(coded.owed.now):
                if each.name == name:
                    own.view(weight.rows, *weight.shape[1:])[rows.first : rows.last] += view
            if coded.owed_of_sums is not None:
                for each, first, run in coded.runs(coded.owed_of_sums.now, engine.mesh.index("dp")):
                    if each.name == name:
                        own.view(-1)[first : first + len(run)] += run
        total.append(own.flatten())
    flat = torch.cat(total)
    engine.mesh.world.all_reduce(flat).wait()
    return flat


def through(layout: str, folder: str) -> tuple[list[float], torch.Tensor]:
    """A whole run, saved half way: its last losses, and what is owed there."""
    with phalanx.Engine(Digits(width=64), layout, device="cpu") as engine:
        losses = []
        for batch in engine.batches():
            if engine.step_number == HALF:
                save(engine, folder)
                at_half = owed(engine)
            losses.append(engine.step(batch).loss)
        return losses[HALF:], at_half


def onward(layout: str, folder: str) -> tuple[list[float], torch.Tensor, list[str]]:
    """The second half, from what was saved."""
    with phalanx.Engine(Digits(width=64), layout, device="cpu") as engine:
        load(engine, folder)
        at_half = owed(engine)
        return [engine.step(batch).loss for batch in engine.batches()], at_half, engine.changes


@pytest.mark.parametrize(
    "layout",
    [
        "dp=4,comm=int4", "fsdp=4,comm=int4", "dp=2,fsdp=2,comm=int4", "dp=4,comm=powersgd:1",
        "dp=2,fsdp=2,comm=powersgd:1",
    ],
)  # fmt: skip
def test_a_run_goes_on_to_the_same_bits(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    losses, at_half = ranks(4, through, layout, str(tmp_path))[0]
    again, taken_up, _ = ranks(4, onward, layout, str(tmp_path))[0]
    assert again == losses
    assert at_half.norm() > 0
    assert torch.equal(taken_up, at_half)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("dp=4,comm=int4", "dp=2,comm=int4"),
        ("dp=2,comm=int4", "fsdp=3,comm=int4"),
        ("fsdp=2,comm=int4", "dp=3,comm=int4"),
        ("dp=2,comm=powersgd:1", "dp=4,comm=powersgd:1"),
        ("dp=2,comm=powersgd:1", "dp=2,comm=int4"),
    ],
)
def test_another_layout_owes_as_much(ranks: Ranks, tmp_path: Path, before: str, after: str) -> None:
    _, at_half = ranks(phalanx.Layout.parse(before).world, through, before, str(tmp_path))[0]
    _, taken_up, changes = ranks(phalanx.Layout.parse(after).world, onward, after, str(tmp_path))[0]
    assert torch.allclose(taken_up, at_half, rtol=1e-5, atol=1e-7)
    then, now = (phalanx.Layout.parse(each).comm for each in (before, after))
    said = f"comm was {then} and is {now}: what was still owed of gradients goes on to be"
    assert changes == ([said] if then != now else [])


def around_a_step(layout: str, folder: str) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """What is owed of what was saved, before a step and after it; and what was said."""
    with phalanx.Engine(Digits(width=64), layout, device="cpu") as engine:
        load(engine, folder)
        before = owed(engine)
        engine.step(next(engine.batches()))
        return before, owed(engine), engine.changes


def test_auto_takes_over_what_was_owed_and_sends_it(ranks: Ranks, tmp_path: Path) -> None:
    """It goes into the next step's gradients, so nothing is owed: `codecs.test_switched` has what these become."""
    _, at_half = ranks(2, through, "dp=2,comm=int4", str(tmp_path))[0]
    before, after, changes = ranks(2, around_a_step, "dp=2,comm=auto", str(tmp_path))[0]
    assert torch.equal(before, at_half)
    assert not after.any()
    assert changes == ["comm was int4 and is auto: what was still owed of gradients is added to the next step's"]


def test_what_a_method_for_matrices_cannot_owe_is_said(ranks: Ranks, tmp_path: Path) -> None:
    _, at_half = ranks(2, through, "dp=2,comm=int4", str(tmp_path))[0]
    _, taken_up, changes = ranks(2, onward, "dp=2,comm=powersgd:1", str(tmp_path))[0]
    said = "what was still owed of matrices goes on to be, and of other gradients is left out"
    assert changes == [f"comm was int4 and is powersgd:1: {said}"]
    first, bias = 64 * 4, 64  # of the first linear
    assert torch.allclose(taken_up[:first], at_half[:first], rtol=1e-5, atol=1e-7)
    assert at_half[first : first + bias].any()
    assert not taken_up[first : first + bias].any()


def test_what_nobody_will_send_is_said(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, through, "dp=2,comm=int4", str(tmp_path))
    _, _, changes = ranks(2, onward, "dp=2", str(tmp_path))[0]
    assert changes == ["comm was int4 and is exact: what was still owed of gradients is left out"]


@pytest.mark.parametrize(("then", "now", "of"), [("int4", "onebit:20", "gradients"), ("onebit:20", "int4", "momentum")])
def test_momentum_is_not_owed_as_gradients(ranks: Ranks, tmp_path: Path, then: str, now: str, of: str) -> None:
    """Whose debts are ten times as large, or a tenth."""
    _, at_half = ranks(2, through, f"dp=2,comm={then}", str(tmp_path))[0]
    assert at_half.any()
    _, taken_up, changes = ranks(2, onward, f"dp=2,comm={now}", str(tmp_path))[0]
    assert not taken_up.any()
    assert f"comm was {then} and is {now}: what was still owed of {of} is left out" in changes


def test_momentum_that_is_owed_goes_on_to_be(ranks: Ranks, tmp_path: Path) -> None:
    losses, at_half = ranks(2, through, "dp=2,comm=onebit:20", str(tmp_path))[0]
    again, taken_up, _ = ranks(2, onward, "dp=2,comm=onebit:20", str(tmp_path))[0]
    assert at_half.any()
    assert torch.equal(taken_up, at_half)
    assert again == losses


def test_what_begins_anew_is_said(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, through, "dp=2,comm=powersgd:1", str(tmp_path))
    _, _, changes = ranks(4, onward, "dp=2,fsdp=2,comm=powersgd:1", str(tmp_path))[0]
    assert changes == ["weights are cut otherwise, or comm has another R: what sums are projected on begins anew"]
