"""The weights of any checkpoint, put into an engine under any layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import phalanx
from tests.checkpoints import contents, manager_at, trained
from tests.parity import HostileVision
from tests.ranks import Ranks


def loaded(folder: Path, layout: str, step: int) -> dict[str, torch.Tensor]:
    from phalanx.train.checkpoint_weights import load_weights

    with phalanx.Engine(HostileVision(), layout, device="cpu") as engine:
        for _, batch in zip(range(1), engine.batches(), strict=False):
            engine.step(batch)
        load_weights(engine, manager_at(folder), step)
        return {name: tensor.clone() for name, tensor in engine.whole_weights().items()}


@pytest.mark.parametrize("layout", ["dp=2", "fsdp=2", "pp=2,micro_batch=8"])
def test_weights_and_buffers_are_those_of_the_checkpoint(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    trained(HostileVision(), "dp=1", tmp_path, steps=2)
    want = {
        name.removeprefix("model/"): value for name, value in contents(tmp_path).items() if name.startswith("model/")
    }
    for found in ranks(2, loaded, tmp_path, layout, 2):
        assert found.keys() >= want.keys()  # which has no weights that are as they began
        assert all(torch.equal(found[name], value) for name, value in want.items())


def test_one_that_is_damaged_is_refused_by_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    trained(HostileVision(), "dp=1", tmp_path, steps=1)
    (data,) = (tmp_path / manager_at(tmp_path).name(1)).glob("*.safetensors")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    with pytest.raises(AssertionError, match=r"(?s)step 1 cannot be read.*step 1 cannot be read"):
        ranks(2, loaded, tmp_path, "dp=2", 1)
