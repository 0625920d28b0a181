"""Frozen weights are in no checkpoint, and a run that goes on, or is exported, has the same ones or says so."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from phalanx import Engine, Layout, WrongUse
from phalanx.checkpoint.frozen import beginnings, leaves_out
from phalanx.checkpoint.slot import Slot
from phalanx.checkpoint.verify import verify
from phalanx.parallel.weights.blueprint import Blueprint
from phalanx.run import Run
from phalanx.train.exporting import export_run
from phalanx.train.restoring import Restorer
from tests.checkpoints import checkpointing, contents, manager_at, newest, trained
from tests.parity import HostileLanguage
from tests.ranks import Ranks
from tests.tasks import Digits

FROZEN = {"0.weight", "0.bias"}


@dataclass
class HalfFrozen(Digits):
    """The first layer stays as it begins; ``counting``: its forward writes to it."""

    begin: str = ""
    whole: bool = False
    counting: bool = False

    def model(self) -> nn.Module:
        model = super().model()
        model[0].requires_grad_(self.whole)
        if self.counting:
            model[0].register_forward_hook(lambda module, given, made: _add(module.bias))
        return model

    def pretrained(self) -> str | None:
        return self.begin or None


def _add(bias: Tensor) -> None:
    with torch.no_grad():
        bias.add_(1)


def test_they_are_left_out_and_the_run_goes_on_under_another_layout(ranks: Ranks, tmp_path: Path) -> None:
    losses = trained(HalfFrozen(), "dp=1", tmp_path / "whole", None, 4)
    ranks(2, trained, HalfFrozen(), "fsdp=2", tmp_path / "half", None, 2)
    manifest = newest(tmp_path / "half").manifest
    assert manifest.frozen.keys() == FROZEN
    assert not any(name.removeprefix("model/") in FROZEN for name in manifest.tensors)
    assert manifest.facts["frozen"]["from"] == "the constructor and seed 0"
    assert leaves_out(manager_at(tmp_path / "half"))
    assert "2 frozen weights left to the constructor and seed 0" in str(verify(str(tmp_path / "half")))
    rest = trained(HalfFrozen(), "dp=1", tmp_path / "rest", tmp_path / "half", 2)
    assert rest == pytest.approx(losses[2:], rel=1e-5)
    for name, held in newest(tmp_path / "whole").manifest.frozen.items():
        assert manifest.frozen[name] == held, "whatever the layout"


@pytest.mark.parametrize("layout", ["pp=2", "tp=2", "fsdp=2,zero=1"])
def test_hashes_are_those_of_one_device(ranks: Ranks, layout: str, tmp_path: Path) -> None:
    trained(HostileLanguage(), "dp=1", tmp_path / "one", None, 1)
    ranks(2, trained, HostileLanguage(), layout, tmp_path / "two", None, 1)
    one, two = newest(tmp_path / "one").manifest, newest(tmp_path / "two").manifest
    assert one.frozen == two.frozen != {}
    assert one.facts["frozen"] == two.facts["frozen"]


def test_what_a_checkpoint_holds_is_kept_from_then_on(tmp_path: Path) -> None:
    """As in older ones, which held all weights: it may be other than where the run began."""
    trained(HalfFrozen(whole=True), "dp=1", tmp_path / "all", None, 2)
    trained(HalfFrozen(), "dp=1", tmp_path / "rest", tmp_path / "all", 1)
    manifest = newest(tmp_path / "rest").manifest
    assert not manifest.frozen
    assert "frozen" not in manifest.facts
    before, after = contents(tmp_path / "all"), contents(tmp_path / "rest")
    assert all(torch.equal(before[f"model/{name}"], after[f"model/{name}"]) for name in FROZEN)
    trained(HalfFrozen(), "dp=1", tmp_path / "frozen", None, 1)
    trained(HalfFrozen(whole=True), "dp=1", tmp_path / "trained", tmp_path / "frozen", 1)
    assert not newest(tmp_path / "trained").manifest.frozen, "what is trained from here on is held"


def test_what_the_model_writes_to_is_kept(tmp_path: Path) -> None:
    losses = trained(HalfFrozen(counting=True), "dp=1", tmp_path / "whole", None, 3)
    trained(HalfFrozen(counting=True), "dp=1", tmp_path / "half", None, 2)
    assert newest(tmp_path / "half").manifest.frozen.keys() == {"0.weight"}
    assert trained(HalfFrozen(counting=True), "dp=1", None, tmp_path / "half", 1) == losses[2:]


def test_another_base_is_refused(tmp_path: Path) -> None:
    """Other files, another seed, and a folder that is gone."""
    base, task = tmp_path / "base", HalfFrozen(begin=str(tmp_path / "base"))
    base.mkdir()
    with Engine(HalfFrozen(seed=5), device="cpu") as engine:
        save_file({name: tensor.clone() for name, tensor in engine.whole_weights().items()}, base / "m.safetensors")
    trained(task, "dp=1", tmp_path / "run", None, 1)
    assert newest(tmp_path / "run").manifest.facts["frozen"]["from"] == str(base)
    shutil.copytree(base, tmp_path / "moved")
    trained(HalfFrozen(begin=str(tmp_path / "moved")), "dp=1", None, tmp_path / "run", 1)
    weights = load_file(base / "m.safetensors")
    weights["0.bias"][3] += 1e-7
    save_file(weights, base / "m.safetensors")
    words = rf"{base} does not give .* step 1 was trained with \(2 frozen weights, 0\.bias among them\).* as it was"
    with pytest.raises(WrongUse, match=words):
        trained(task, "dp=1", None, tmp_path / "run", 1)
    found = newest(tmp_path / "run")
    began = beginnings(Blueprint(task.model, task.seed), base, task, found.manifest)
    assert torch.equal(began("0.weight"), weights["0.weight"])
    with pytest.raises(WrongUse, match=r"does not give .* \(0\.bias is another\)"):
        began("0.bias")
    shutil.rmtree(base)
    with pytest.raises(WrongUse, match=r"to begin from\. Check --init-from"):
        trained(task, "dp=1", None, tmp_path / "run", 1)


@dataclass
class NarrowFrozen(HalfFrozen):
    """The first layer is held in half the width where it is computed with so."""

    def model(self) -> nn.Module:
        model = super().model()
        model[0].to(torch.bfloat16)
        return model


def test_another_precision_that_holds_the_same_numbers_is_the_same(ranks: Ranks, tmp_path: Path) -> None:
    trained(NarrowFrozen(precision="bf16"), "dp=1", tmp_path / "narrow", None, 1)
    assert newest(tmp_path / "narrow").manifest.frozen["0.weight"].dtype == "bfloat16"
    ranks(2, trained, NarrowFrozen(), "fsdp=2", tmp_path / "wide", tmp_path / "narrow", 1)
    assert newest(tmp_path / "wide").manifest.frozen["0.weight"].dtype == "float32"
    trained(NarrowFrozen(precision="bf16"), "dp=1", None, tmp_path / "wide", 1)
    trained(HalfFrozen(), "dp=1", tmp_path / "exact", None, 1)
    words = r"0\.bias among them, in float32 then and bfloat16 now: precision=fp32 then"
    with pytest.raises(WrongUse, match=words):
        trained(NarrowFrozen(precision="bf16"), "dp=1", None, tmp_path / "exact", 1)


def test_copies_in_memory_leave_them_out_too(tmp_path: Path) -> None:
    slots = [Slot(), Slot()]
    with Engine(HalfFrozen(), Layout.parse("dp=1"), device="cpu") as engine:
        expected = {}
        for batch in islice(engine.batches(), 2):
            engine.step(batch)
        with checkpointing(engine, tmp_path / "none", slots=slots) as checkpointer:
            checkpointer.stage(save=False)
            checkpointer.drain()
        expected = {name: tensor.clone() for name, tensor in engine.whole_weights().items()}
    names = {place.name for place, _ in next(s for s in slots if s.step() is not None).staged().tensors}
    assert "model/2.bias" in names
    assert not names & {f"model/{name}" for name in FROZEN}
    with Engine(HalfFrozen(), Layout.parse("dp=1"), device="cpu") as engine:
        assert Restorer(engine, manager_at(tmp_path / "none"), slots).restore() == "memory"
        assert engine.step_number == 2
        assert all(torch.equal(expected[name], tensor) for name, tensor in engine.whole_weights().items())
    other, words = HalfFrozen(seed=3), "seed 3 does not give the weights"
    with Engine(other, device="cpu", allow_changes=True) as engine, pytest.raises(WrongUse, match=words):
        Restorer(engine, manager_at(tmp_path / "none"), slots).restore()
    for slot in slots:
        slot.close()


def run_command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "phalanx", *words], capture_output=True, text=True)


def test_a_run_begins_and_goes_on_from_a_folder_and_is_exported(tmp_path: Path) -> None:
    """With --init-from, which a run that goes on needs again."""
    file, run, base = tmp_path / "half.py", Run(tmp_path / "run"), tmp_path / "base"
    file.write_text(TASK)
    base.mkdir()
    with Engine(HalfFrozen(seed=5), device="cpu") as engine:
        save_file({n: tensor.clone() for n, tensor in engine.whole_weights().items()}, base / "model.safetensors")
    train = ["train", str(file), "--init-from", str(base), "--steps", "2", "--run", str(run.path)]
    assert not run_command(*train).returncode
    assert export_run(run.path, tmp_path / "first").holds
    resume = ["train", "--resume", "--run", str(run.path)]
    assert not run_command(*resume, "--steps", "4", "--on", "local:2").returncode
    assert verify(str(run.path)).holds, "and the final weights are the last checkpoint's"
    assert export_run(run.path, tmp_path / "last", format="safetensors").holds
    begun, early, late = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "first", "last"))
    assert begun.keys() == early.keys() == late.keys()
    assert all(torch.equal(begun[name], early[name]) and torch.equal(begun[name], late[name]) for name in FROZEN)
    assert not torch.equal(early["2.weight"], late["2.weight"])
    (base / "model.safetensors").unlink()
    gone = run_command(*resume, "--steps", "6")
    assert gone.returncode == 2
    assert f"there is no .safetensors file in {base}" in gone.stderr + gone.stdout


TASK = """
from dataclasses import dataclass
from tests.tasks import Digits

@dataclass
class Half(Digits):
    def model(self):
        model = super().model()
        model[0].requires_grad_(False)
        return model
"""
