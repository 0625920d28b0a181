"""State found again: under any layout the same, bit for bit, and never half of it."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import phalanx
from phalanx import Layout, WrongUse
from phalanx.checkpoint.slot import Slot
from phalanx.checkpoint.verify import verify
from phalanx.errors import CannotHere
from phalanx.run import Run
from phalanx.train import checkpointing as checkpointing_module
from phalanx.train.engine import Engine
from phalanx.train.neighbours import guests_of
from phalanx.train.policy import Policy
from phalanx.train.restoring import Restorer, done_again
from tests.checkpoints import as_older, checkpointing, contents, exchange_part, manager_at, newest, trained
from tests.empty_weights import WithNothing
from tests.parity import HostileLanguage, HostileVision, Mixture
from tests.ranks import Ranks
from tests.tasks import Digits

CHAINS = {
    "language": (HostileLanguage(), "fsdp=4", "tp=2,pp=2", "dp=8", "dp=1", "fsdp=4"),
    "heads": (HostileLanguage(heads=8, kv_heads=2), "tp=4", "fsdp=2,cp=2", "dp=2,fsdp=2,zero=1", "fsdp=2,tp=2,zero=2"),
    "mixture": (Mixture(layers=4), "fsdp=4,ep=4", "pp=2,tp=2", "fsdp=4,ep=2", "dp=2,fsdp=2,ep=2", "dp=1"),
    "vision": (HostileVision(), "fsdp=4", "pp=2", "dp=2,fsdp=2,zero=1", "dp=1"),
}


@pytest.mark.parametrize("name", CHAINS)
def test_state_goes_from_layout_to_layout_unchanged(ranks: Ranks, name: str, tmp_path: Path) -> None:
    """Rows that do not divide, shared, frozen, unused and 0-dim weights, buffers, moments: saved without a step."""
    task, first, *others = CHAINS[name]
    before = tmp_path / "0"
    ranks(Layout.parse(first).world, trained, task, first, before, None, 2)
    begun, expected = newest(before).manifest, contents(before)
    assert any(name.startswith("optimizer/exp_avg_sq/") for name in expected)
    assert any(name.startswith("counters/step/") for name in expected)
    for number, layout in enumerate(others, 1):
        after = tmp_path / str(number)
        ranks(Layout.parse(layout).world, trained, task, layout, after, before)
        found = contents(after)
        assert found.keys() == expected.keys(), layout
        for tensor, value in expected.items():
            assert torch.equal(found[tensor], value), f"{layout}: {tensor}"
        assert newest(after).manifest.hash("") == begun.hash(""), layout
        assert newest(after).manifest.numbers == begun.numbers
        before = after


SAME = [(HostileLanguage(steps=4), "fsdp=2,tp=2"), (HostileVision(steps=4, precision="fp32"), "dp=2,fsdp=2,zero=2")]


@pytest.mark.parametrize(("task", "layout"), SAME, ids=["language", "vision"])
def test_a_run_taken_up_half_way_ends_as_if_it_had_gone_on(
    ranks: Ranks, task: phalanx.Task, layout: str, tmp_path: Path
) -> None:
    losses = ranks(4, trained, task, layout, tmp_path / "at once", None, 4)[0]
    ranks(4, trained, task, layout, tmp_path / "half", None, 2)
    assert ranks(4, trained, task, layout, tmp_path / "rest", tmp_path / "half", 2)[0] == losses[2:]
    found, expected = contents(tmp_path / "rest"), contents(tmp_path / "at once")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert newest(tmp_path / "rest").manifest.hash("") == newest(tmp_path / "at once").manifest.hash("")


@pytest.mark.parametrize("layout", ["tp=2,pp=2", "dp=1"])
def test_a_run_goes_on_under_another_layout(ranks: Ranks, layout: str, tmp_path: Path) -> None:
    task = HostileLanguage(steps=6)
    losses = ranks(1, trained, task, "dp=1", None, None, 6)[0]
    ranks(4, trained, task, "fsdp=4", tmp_path, None, 3)
    found = ranks(Layout.parse(layout).world, trained, task, layout, None, tmp_path, 3)[0]
    assert found == pytest.approx(losses[3:], rel=1e-9)


def test_the_loss_scale_goes_on(tmp_path: Path) -> None:
    task = Digits(precision="fp16", spoil=3)  # a sample that is not finite: its steps are skipped, and halve the scale

    def scale(start: Path | None, steps: int, to: Path | None) -> list[float]:
        with Engine(task, device="cpu") as engine:
            if start is not None:
                Restorer(engine, manager_at(start)).restore()
            for batch in islice(engine.batches(), steps):
                engine.step(batch)
            if to is not None:
                with checkpointing(engine, to) as checkpointer:
                    checkpointer.save_now()
            return engine.loss_scale.state()

    expected = scale(None, 5, None)
    half = scale(None, 3, tmp_path)
    assert expected[0] < 2.0**16
    assert scale(tmp_path, 0, None) == half
    assert scale(tmp_path, 2, None) == expected


def spoil(path: Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 3)


DAMAGES = {
    "a flipped byte": (lambda folder: spoil(folder / "part-00000.safetensors"), "part-00000.safetensors has changed"),
    "a short file": (lambda folder: cut(folder / "part-00000.safetensors"), "part-00000.safetensors is cut short"),
    "a missing file": (lambda folder: (folder / "part-00000.safetensors").unlink(), "cannot be read: No such file"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json cannot be read: No such file"),
    "a flipped byte in the manifest": (lambda folder: spoil(folder / "manifest.json", 40), "manifest.json has changed"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = Digits()
    trained(task, "dp=1", tmp_path, None, 2)
    trained(task, "dp=1", tmp_path, tmp_path, 2)
    harm, words = DAMAGES[damage]
    harm(tmp_path / "step-00000004")
    before = {path: path.read_bytes() for path in tmp_path.glob("step-00000002/*")}
    noted: list[dict[str, Any]] = []
    with Engine(task, device="cpu") as engine:
        note = lambda kind, **fields: noted.append({"kind": kind, **fields})  # noqa: E731
        assert Restorer(engine, manager_at(tmp_path), note=note).restore() == f"{tmp_path}/step-00000002"
        assert engine.step_number == 2
        said = capsys.readouterr().out
        assert "step-00000004" in said
        assert words in said
        assert noted[0]["kind"] == "damaged"
        assert words in noted[0]["reason"]
        for batch in islice(engine.batches(), 2):
            engine.step(batch)
        with checkpointing(engine, tmp_path) as checkpointer:
            checkpointer.save_now()  # the damaged one is out of the way
    assert manager_at(tmp_path).steps() == [2, 4]
    assert not list(newest(tmp_path).verify())
    assert {path: path.read_bytes() for path in tmp_path.glob("step-00000002/*")} == before
    assert [path.name for path in tmp_path.glob("damaged-*")] == ["damaged-step-00000004"]


def found_by(folder: Path, harm: str) -> str | None:
    with Engine(Digits(), Layout(fsdp=2), device="cpu") as engine:
        if engine.environment.rank == 1 and harm:
            spoil(folder / harm)
        engine.mesh.world.all_gather_words([])
        return Restorer(engine, manager_at(folder)).restore()


def test_ranks_agree_on_what_is_damaged(ranks: Ranks, tmp_path: Path) -> None:
    """Only the second rank reads the second part."""
    ranks(2, trained, Digits(), "fsdp=2", tmp_path, None, 1)
    ranks(2, trained, Digits(), "fsdp=2", tmp_path, tmp_path, 1)
    assert ranks(2, found_by, tmp_path, "step-00000002/part-00001.safetensors") == [f"{tmp_path}/step-00000001"] * 2


def test_a_part_of_another_step_or_run_is_not_taken_up(ranks: Ranks, tmp_path: Path) -> None:
    """Half of each weight would be another's."""
    here, other = tmp_path / "here", tmp_path / "other"
    ranks(2, trained, Digits(), "fsdp=2", here, None, 1)
    ranks(2, trained, Digits(), "fsdp=2", here, here, 1)
    ranks(2, trained, Digits(seed=7), "fsdp=2", other, None, 2)
    for wrong in (here / "step-00000001", other / "step-00000002"):
        shutil.copytree(here, at := tmp_path / wrong.parent.name / "mixed")
        exchange_part(at / "step-00000002", wrong)
        assert ranks(2, found_by, at, "") == [f"{at}/step-00000001"] * 2
        shutil.copytree(here, at := tmp_path / wrong.parent.name / "older")
        as_older(at / "step-00000002")
        exchange_part(at / "step-00000002", wrong)
        assert ranks(2, found_by, at, "") == [f"{at}/step-00000001"] * 2


def test_a_checkpoint_of_another_run_is_not_taken_up(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.path.mkdir()
    trained(Digits(), "dp=1", run.checkpoints_path, None, 1)
    trained(Digits(seed=7), "dp=1", tmp_path / "other", None, 1)
    run.events_path(0).parent.mkdir()
    noted = {"kind": "checkpoint", "step": 1, "hash": newest(tmp_path / "other").manifest.hash()}
    run.events_path(0).write_text(json.dumps(noted) + "\n")
    with Engine(Digits(), device="cpu", run=run) as engine, pytest.raises(CannotHere, match="is not what "):
        Restorer(engine, manager_at(run.checkpoints_path)).restore()


def test_what_an_older_version_wrote_is_taken_up_with_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(Digits(), "dp=1", tmp_path, None, 1)
    as_older(tmp_path / "step-00000001")
    with Engine(Digits(), device="cpu") as engine:
        assert Restorer(engine, manager_at(tmp_path)).restore() == f"{tmp_path}/step-00000001"
    assert "was written by an older version, without hashes of its parts" in capsys.readouterr().out


def test_where_nothing_is_whole_nothing_is_trained_and_all_stays(tmp_path: Path) -> None:
    trained(Digits(), "dp=1", tmp_path, None, 1)
    spoil(tmp_path / "step-00000001" / "part-00000.safetensors")
    with (
        Engine(Digits(), device="cpu") as engine,
        pytest.raises(CannotHere, match="none of the 1 checkpoints"),
    ):
        Restorer(engine, manager_at(tmp_path)).restore()
    assert [path.name for path in tmp_path.glob("*step*")] == ["step-00000001"]


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with phalanx.Engine(Digits(), device="cpu") as engine:
        with pytest.raises(phalanx.WrongUse, match="typo holds no checkpoint to go on from"):
            phalanx.load(engine, tmp_path / "typo")
        phalanx.save(engine, tmp_path / "there")
        assert phalanx.load(engine, tmp_path / "there") == 0


def test_another_models_checkpoint_is_refused_before_anything_changes(tmp_path: Path) -> None:
    trained(Digits(width=16), "dp=1", tmp_path, None, 1)
    for task, words in (
        (Digits(width=17), r"0\.weight has shape \(16, 4\) in the checkpoint and \(17, 4\) here"),
        (HostileVision(precision="fp32"), "the checkpoint has no "),
    ):
        with Engine(task, device="cpu") as engine:
            before = {name: tensor.clone() for name, tensor in engine.whole_weights().items()}
            with pytest.raises(WrongUse, match=words):
                Restorer(engine, manager_at(tmp_path)).restore()
            assert all(torch.equal(before[name], tensor) for name, tensor in engine.whole_weights().items())
    for name in ("seed", "global_batch", "samples"):
        changed = replace(Digits(), **{name: 24})
        with Engine(changed, device="cpu") as engine, pytest.raises(WrongUse, match="to come would be others"):
            Restorer(engine, manager_at(tmp_path)).restore()


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(Digits(), "dp=1", tmp_path, None, 1)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("unpickled")

    with Engine(Digits(), device="cpu") as engine:
        for owner, name in ((pickle, "loads"), (pickle, "load"), (pickle, "Unpickler"), (torch, "load")):
            monkeypatch.setattr(owner, name, refuse)
        assert Restorer(engine, manager_at(tmp_path)).restore() is not None
    assert not list(newest(tmp_path).verify())


# Memory.


def opened(files: list[Path]) -> list[Slot]:
    """Slots over files: as memory of a supervisor, they outlive a rank."""
    return [Slot(os.open(file, os.O_RDWR | os.O_CREAT)) for file in files]


@contextmanager
def on_hosts(hosts: str) -> Iterator[None]:
    """While this rank believes to be on a host of its own, or on one with others: so many ranks a host."""
    before = dict(os.environ)
    os.environ["PHALANX_HOSTS"] = hosts
    if "," in hosts:
        os.environ["LOCAL_RANK"] = "0"
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def staged(task: phalanx.Task, layout: str, hosts: str, folder: Path) -> dict[str, Tensor]:
    """Two steps, with a copy in memory after each, and what the run then has."""
    with ExitStack() as undo:
        undo.enter_context(on_hosts(hosts))
        engine = undo.enter_context(Engine(task, Layout.parse(layout), device="cpu"))
        rank = engine.environment.rank
        slots = opened([folder / f"{rank} {turn}" for turn in range(2)])
        origins = guests_of(engine.environment.hosts, rank) if "," in hosts else []
        guests = [opened([folder / f"{origin} at {rank} {turn}" for turn in range(2)]) for origin in origins]
        policy = Policy(minutes=0, memory_steps=1)
        undo.enter_context(mock.patch.object(checkpointing_module, "REST_OF_LINKS", 0))
        options: dict[str, Any] = {"slots": slots, "guests": guests, "generation": 1}
        with checkpointing(engine, folder / "checkpoints", policy, **options) as checkpointer:
            for batch in islice(engine.batches(), 2):
                checkpointer.before_step()
                checkpointer.after_step(engine.step(batch).signals, last=False)
                checkpointer.drain()
        return dict(engine.whole_weights())


def recalled(
    task: phalanx.Task, layout: str, hosts: str, folder: Path, lost: str = ""
) -> tuple[str | None, int, dict[str, Tensor], list[int | None]]:
    """Where the state was found, its step, the weights, and what is left in this host's memory."""
    with on_hosts(hosts), Engine(task, Layout.parse(layout), device="cpu") as engine:
        where = engine.environment.hosts
        own = [str(r) for r, host in enumerate(where) if host == where[engine.environment.rank]]
        files = [file for file in sorted(folder.iterdir()) if file.is_file()]
        here = [file for file in files if file.name.split()[-2] in own and (not lost or not re.search(lost, file.name))]
        slots = opened(here)
        manager = manager_at(folder / "checkpoints")
        manager.store.make("")
        engine.mesh.world.all_gather_words([])
        if engine.environment.rank == 0:
            manager.fence(2)
        engine.mesh.world.all_gather_words([])
        found = Restorer(engine, manager, slots, generation=2).restore()
        return found, engine.step_number, dict(engine.whole_weights()), [slot.step() for slot in slots]


WHERE = {
    "one host": ("fsdp=2", "2", ""),
    "a stage a host": ("pp=2", "1,1", "at"),
    "a copy a host": ("dp=2", "1,1", "at"),
    "half a state a host": ("fsdp=2", "1,1", ""),
}


@pytest.mark.parametrize("where", WHERE)
def test_state_is_found_in_memory(ranks: Ranks, where: str, tmp_path: Path) -> None:
    layout, hosts, lost = WHERE[where]
    task = HostileLanguage()
    expected = ranks(2, staged, task, layout, hosts, tmp_path)[0]
    for found, step, weights, left in ranks(2, recalled, task, layout, hosts, tmp_path, lost):
        assert (found, step) == ("memory", 2)
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
        assert set(left) <= {2, None}


def test_copies_that_lead_nowhere_make_room_first(ranks: Ranks, tmp_path: Path) -> None:
    """One rank was killed while it staged step 2: all go on from step 1, which must outlive the next staging."""
    ranks(2, staged, HostileLanguage(), "fsdp=2", "2", tmp_path)
    newer = next(slot for slot in opened([tmp_path / "1 0", tmp_path / "1 1"]) if slot.step() == 2)
    newer.void()
    for source, step, _, left in ranks(2, recalled, HostileLanguage(), "fsdp=2", "2", tmp_path):
        assert (source, step) == ("memory", 1)
        assert sorted(left, key=str) == [1, 1, None, None]


@pytest.mark.parametrize(
    ("step", "reached", "words"),
    [
        (5, 6, "step 6 was done and not kept, the newest state that is whole is of step 5"),
        (5, 8, "steps 6 to 8 were done and not kept, the newest state that is whole is of step 5"),
        (0, 1, "step 1 was done and not kept, no state was whole yet: from the beginning"),
    ],
)
def test_it_is_said_why_steps_come_again(step: int, reached: int, words: str) -> None:
    assert done_again(step, reached) == f"  again  {words}; the same samples come again"


def test_nothing_is_said_where_no_step_comes_again() -> None:
    assert done_again(6, 6) == done_again(6, 5) == ""


def moved_on(folder: Path) -> list[float]:
    losses = trained(WithNothing(), "fsdp=2", folder, None, 1)
    with Engine(WithNothing(), Layout(dp=2), device="cpu") as engine:
        assert Restorer(engine, manager_at(folder)).restore() is not None
        return losses + [engine.step(batch).loss for batch in islice(engine.batches(), 1)]


def test_weights_without_elements_are_saved_and_taken_up(ranks: Ranks, tmp_path: Path) -> None:
    expected = trained(WithNothing(), "dp=1", None, None, 2)
    for losses in ranks(2, moved_on, tmp_path / "run"):
        assert losses == pytest.approx(expected, rel=1e-5)
    assert verify(str(tmp_path / "run")).holds
