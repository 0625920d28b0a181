"""A checkpoint is read into the model that it is of, and into no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx import Engine, WrongUse
from phalanx.checkpoint.fitting import check_fits
from phalanx.checkpoint.manifest import Damaged
from phalanx.checkpoint.state import State
from tests.checkpoints import manager_at, trained
from tests.tasks import Digits


def test_a_checkpoint_says_which_weights_it_is_of(tmp_path: Path) -> None:
    trained(Digits(), "dp=1", tmp_path, None, 1)
    manifest = manager_at(tmp_path).open(1).manifest
    assert {n for n in manifest.tensors if n.endswith("0.weight")} == {
        "model/0.weight", "optimizer/exp_avg/0.weight", "optimizer/exp_avg_sq/0.weight", "counters/step/0.weight",
    }  # fmt: skip
    with Engine(Digits(), device="cpu") as engine:
        state = State(engine.spread, engine.optimizer)
        check_fits(state, manifest)
        del manifest.tensors["model/0.bias"]
        with pytest.raises(WrongUse, match=r"the checkpoint has no 0\.bias; .* another model"):
            check_fits(state, manifest)
        manifest = manager_at(tmp_path).open(1).manifest
        manifest.tensors["model/more"] = manifest.tensors["model/0.bias"]
        with pytest.raises(WrongUse, match="the checkpoint holds more, which the model does not have"):
            check_fits(state, manifest)


@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [
        ("model/0.weight", "int32", r"0\.weight is int32 in the checkpoint and float32 here.* another model"),
        ("model/0.bias", "complex64", r"0\.bias is complex64 in the checkpoint and float32 here"),
        ("optimizer/exp_avg/0.weight", "int32", "has optimizer/exp_avg/0.weight as int32"),
        ("counters/step/0.weight", "int32", "has counters/step/0.weight as int32"),
        ("model/0.weight", "bfloat16", ""),
    ],
)
def test_whole_numbers_do_not_stand_in_for_real_ones(name: str, dtype: str, words: str, tmp_path: Path) -> None:
    """They have as many bytes, and would be read as numbers in the billions. Another precision is one."""
    trained(Digits(), "dp=1", tmp_path, None, 1)
    manifest = manager_at(tmp_path).open(1).manifest
    manifest.tensors[name].dtype = dtype
    with Engine(Digits(), device="cpu") as engine:
        state = State(engine.spread, engine.optimizer)
        if not words:
            check_fits(state, manifest)
            return
        with pytest.raises((WrongUse, Damaged), match=words):
            check_fits(state, manifest)


def test_what_nothing_keeps_is_damage(tmp_path: Path) -> None:
    trained(Digits(), "dp=1", tmp_path, None, 1)
    manifest = manager_at(tmp_path).open(1).manifest
    manifest.tensors["optimizer/exp_avg/0.bias"].shape = (3, 3)
    with Engine(Digits(), device="cpu") as engine:
        state = State(engine.spread, engine.optimizer)
        with pytest.raises(WrongUse, match=r"keeps exp_avg of 0\.bias in a shape of its own"):
            check_fits(state, manifest)
        manifest.tensors["callbacks/average/0.bias"] = manifest.tensors.pop("optimizer/exp_avg/0.bias")
        with pytest.raises(Damaged, match="which nothing keeps"):
            check_fits(state, manifest)
