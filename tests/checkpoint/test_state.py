"""A rank's state under layout-free names: of any optimizer and any weight, each part kept by one who holds it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from phalanx import Layout
from phalanx.checkpoint.state import State
from phalanx.train.engine import Engine
from tests.checkpoints import contents, manager_at, newest, trained
from tests.parity import HostileLanguage
from tests.ranks import Ranks
from tests.tasks import Digits


class Odd(optim.Optimizer):
    """Keeps plain numbers and words by weight, and changes numbers in its groups, each group its own."""

    elementwise = True

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.1, "calls": 0, "noise": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["calls"] += 1
            group["noise"] *= 0.5 + 0.1 * group["kind"]
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.state[weight]
                    state["times"] = state.get("times", 0) + 1
                    state["mean"] = state.get("mean", 0.0) * 0.9 + 0.1 * state["times"]
                    state["word"] = "odd" if state["times"] % 2 else None
                    state["trace"] = state.get("trace", torch.zeros_like(weight)) * 0.9 + weight.grad
                    weight.sub_(group["lr"] * group["noise"] * (state["trace"] + state["mean"] * weight))


def grouped(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    kinds: dict[int, list[nn.Parameter]] = {}
    for weight in params:
        kinds.setdefault(1 if weight.logical_name.startswith("blocks.1") else 0, []).append(weight)
    return [{"params": found, "kind": kind} for kind, found in kinds.items()]


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "plain sgd": lambda p: optim.SGD(p, lr=0.1),
    "adamw": lambda p: optim.AdamW(p, lr=1e-2, amsgrad=True),
    "fused": lambda p: optim.AdamW(p, lr=1e-2, fused=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=1e-2),
    "asgd": lambda p: optim.ASGD(p, lr=1e-2),
    "odd": lambda p: Odd(grouped(p)),
}


@dataclass
class Various(HostileLanguage):
    """With integer parameters, and tensors without elements."""

    kind: str = "adamw"

    def model(self) -> nn.Module:
        model = super().model()
        model.table = nn.Parameter(torch.arange(5), requires_grad=False)
        model.hollow = nn.Parameter(torch.zeros(3, 0))
        model.register_buffer("void", torch.zeros(0))
        model.register_buffer("limits", torch.tensor([1.5, 2.5]))
        return model

    def optimizer(self, params: list[nn.Parameter]) -> optim.Optimizer:
        return OPTIMIZERS[self.kind](params)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_goes_on_where_it_was(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    """Half a run on stages, the other half on shards, against all of it on one device."""
    task = Various(kind=kind, steps=4)
    losses = ranks(1, trained, task, "dp=1", tmp_path / "whole", None, 4)[0]
    ranks(2, trained, task, "pp=2", tmp_path / "half", None, 2)
    rest = ranks(2, trained, task, "fsdp=2", tmp_path / "rest", tmp_path / "half", 2)[0]
    assert rest == pytest.approx(losses[2:], rel=1e-9)
    found, expected = newest(tmp_path / "rest").manifest, newest(tmp_path / "whole").manifest
    assert {n: (t.dtype, t.shape) for n, t in found.tensors.items()} == {
        n: (t.dtype, t.shape) for n, t in expected.tensors.items()
    }
    assert found.numbers == pytest.approx(expected.numbers, nan_ok=True)
    assert found.facts["options"] == expected.facts["options"]
    assert "table" in found.frozen
    assert "model/limits" in found.tensors
    whole = contents(tmp_path / "whole")
    for name, tensor in contents(tmp_path / "rest").items():
        assert torch.allclose(tensor.double(), whole[name].double(), rtol=1e-7, atol=1e-9), name
    if kind == "odd":
        assert {name.split("/")[1] for name in found.numbers} == {"times", "mean", "word"}
        assert {changed["noise"] for changed in found.facts["options"].values()} == {0.5**4, 0.6**4}


def shares(layout: str, hosts: list[int]) -> list[tuple[str, Any, int, bool, bool]]:
    with Engine(HostileLanguage(heads=8, kv_heads=2), Layout.parse(layout), device="cpu") as engine:
        engine.step(next(iter(engine.batches())))
        entries = list(State(engine.spread, engine.optimizer, hosts).entries())
        return [(e.name, e.box.offsets, e.value.numel(), e.kept, e.written) for e in entries]


@pytest.mark.parametrize("layout", ["dp=4", "tp=4", "dp=2,pp=2"])
def test_each_part_is_written_once_and_kept_once_a_host(ranks: Ranks, layout: str) -> None:
    hosts = [0, 0, 1, 1]
    found = ranks(4, shares, layout, hosts)
    parts = {entry[:2] for entries in found for entry in entries}
    assert parts
    written = [sum(size for *_, size, _, written in entries if written) for entries in found]
    for part in parts:
        holders = [(hosts[r], e) for r, entries in enumerate(found) for e in entries if e[:2] == part]
        assert sum(e[4] for _, e in holders) == 1, part
        for host in {host for host, _ in holders}:
            assert sum(e[3] for where, e in holders if where == host) == 1, part
    assert max(written) < 3 * min(written), "and the work is shared out"


def test_room_is_made_for_moments(tmp_path: Path) -> None:
    trained(Digits(), "dp=1", tmp_path, None, 1)
    with Engine(Digits(), device="cpu") as engine:
        weight: Tensor = engine.spread.weights["0.weight"].shard
        assert not engine.optimizer.state[weight]
        wanted = State(engine.spread, engine.optimizer).wanted(manager_at(tmp_path).open(1).manifest)
        moments = engine.optimizer.state[weight]
        assert moments.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert moments["exp_avg"].shape == weight.shape
        assert moments["step"].shape == ()
        assert wanted["optimizer/exp_avg/0.weight"][0][1].data_ptr() == moments["exp_avg"].data_ptr()
