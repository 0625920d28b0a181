"""A step's update in one pass against the optimizer's own, interpreted; and where it is not done so."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

import phalanx
from phalanx.kernels import choice
from phalanx.recipes.gpt import GPT
from phalanx.train.update import Prepared
from tests.kernels.apart import runs
from tests.parity import Summed

SMALL: dict[str, Any] = {"width": 32, "layers": 2, "global_batch": 4, "megabytes": 0.05, "length": 16, "steps": 5}


def trained(
    precision: str, layout: str, device: str, kernels: bool, hooked: bool = False, **settings: Any
) -> dict[str, Any]:
    """Five steps, with kernels or without."""
    choice.interpreted = kernels and device == "cpu"
    noted: list[dict[str, torch.Tensor]] = []
    task = GPT(**{**SMALL, "precision": precision, **settings})
    with phalanx.Engine(task, layout, device=device) as engine:
        assert engine.update.in_one_pass == kernels
        if hooked:
            engine.optimizer.register_step_pre_hook(lambda *_: None)
            assert not engine.update.in_one_pass
        engine.callbacks.add(
            Summed(lambda whole: noted.append({n: g.clone() for n, g in whole.items() if g is not None}))
        )
        losses = [engine.step(batch).loss for batch in engine.batches()]
        state = engine.optimizer.state
        steps = {float(state[weight.shard]["step"]) for weight in engine.spread.weights.values()}
        return {"losses": losses, "weights": engine.whole_weights(), "steps": steps, "gradients": noted}


class Meddling(phalanx.Callback):
    """Has the optimizer begin again before its third update, and moves a weight that is not trained."""

    def before_update(self, engine: Any) -> None:
        if engine.step_number == 2:
            engine.optimizer.state.clear()

    def on_step(self, engine: Any, metrics: Any) -> None:
        engine.spread.weights["norm.weight"].shard.data.add_(0.5)

    def trains(self, step: int, weight: str) -> bool:
        return weight != "norm.weight"


class Meddled(GPT):
    def callbacks(self) -> list[phalanx.Callback]:
        return [Meddling()]


def meddled(kernels: bool) -> dict[str, Any]:
    choice.interpreted = kernels
    with phalanx.Engine(Meddled(**SMALL, precision="bf16"), "dp=1", device="cpu") as engine:
        for batch in engine.batches():
            engine.step(batch)
        kept = engine.optimizer.state[engine.spread.weights["head.weight"].shard]
        return {"weights": engine.whole_weights(), "computes": engine.model.norm.weight[0].item(), "step": kept["step"]}


def compare_meddled() -> None:
    """A table of places that was made before a callback is not used after it."""
    plain, own = meddled(kernels=False), meddled(kernels=True)
    assert own["computes"] == plain["computes"] > 2, (own["computes"], plain["computes"])
    assert float(own["step"]) == float(plain["step"]) == 3
    for name, want in plain["weights"].items():
        assert float((own["weights"][name] - want).norm() / want.norm()) < 2e-2, name


class Restless(phalanx.Callback):
    """Puts what is to be updated, and what is kept of it, into other memory before the fourth update."""

    def before_update(self, engine: Any) -> None:
        if engine.step_number == 3:
            for shard, kept in engine.optimizer.state.items():
                shard.data = shard.data.clone()
                kept["exp_avg"].data = kept["exp_avg"].data.clone()
                kept["step"].fill_(7)


class Moved(GPT):
    def callbacks(self) -> list[phalanx.Callback]:
        return [Restless()]


@pytest.mark.parametrize(("task", "tables", "steps"), [(GPT, 1, 5.0), (Moved, 2, 9.0)])
def test_places_are_found_anew_where_something_has_moved(
    monkeypatch: pytest.MonkeyPatch, task: type[GPT], tables: int, steps: float
) -> None:
    launched: list[torch.Tensor] = []
    launcher: Any = types.ModuleType("phalanx.kernels.adamw_triton")
    launcher.SPAN, launcher.update = 4096, lambda places, *_: launched.append(places)
    monkeypatch.setitem(sys.modules, launcher.__name__, launcher)
    with phalanx.Engine(task(**SMALL), "dp=1,micro_batch=2", device="cpu") as engine:
        engine.update._known = True  # as on a GPU
        for batch in engine.batches():
            engine.step(batch)
        shards = {weight.shard.data_ptr() for weight in engine.spread.weights.values()}
        assert {float(kept["step"]) for kept in engine.optimizer.state.values()} == {steps}
    assert len(launched) == 2 * 4  # two groups; the first update was the optimizer's, which began what it keeps
    assert len({id(table) for table in launched}) == 2 * tables
    assert {row[0] for table in launched[-2:] for row in table.tolist()} == shards


def compare(device: str) -> None:
    """Other roundings alone set them apart."""
    for precision, layout in (("fp32", "dp=1"), ("bf16", "dp=1"), ("bf16", "dp=1,micro_batch=2")):
        tolerance = 1e-4 if precision == "fp32" else 2e-2
        plain, own = (trained(precision, layout, device, kernels) for kernels in (False, True))
        told = precision, layout
        assert own["steps"] == plain["steps"] == {5.0}, told
        assert torch.allclose(torch.tensor(own["losses"]), torch.tensor(plain["losses"]), rtol=tolerance), told
        for name, want in plain["gradients"][0].items():  # of the first step, from the same weights
            assert own["gradients"][0][name].dtype == want.dtype == torch.float32
            off = float((own["gradients"][0][name] - want).norm() / want.norm())
            assert off < tolerance, (told, name, off)
        for name, want in plain["weights"].items():
            off = float((own["weights"][name] - want).norm() / want.norm())
            assert off < tolerance, (told, name, off)


def compare_narrow() -> None:
    """Also when what is kept is narrow: rounded by the same draws."""
    few: dict[str, Any] = {"moments": "float8", "width": 8, "heads": 2, "layers": 1, "steps": 3}
    plain, own = (trained("fp32", "dp=1", "cpu", kernels, **few) for kernels in (False, True))
    assert own["steps"] == plain["steps"] == {3.0}
    assert torch.allclose(torch.tensor(own["losses"]), torch.tensor(plain["losses"]), rtol=1e-4)
    for name, want in plain["weights"].items():
        assert float((own["weights"][name] - want).norm() / want.norm()) < 1e-3, name


def test_narrow_moments_in_one_pass_are_the_optimizers_own() -> None:
    runs("import tests.train.test_update as test; test.compare_narrow()", TRITON_INTERPRET="1")


def test_an_update_in_one_pass_is_the_optimizers_own() -> None:
    program = "import tests.train.test_update as test; test.compare('cpu'); test.compare_meddled()"
    runs(program, TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_an_update_in_one_pass_is_the_optimizers_own_on_a_gpu() -> None:
    whole = {p: trained(p, "dp=1", "cuda", kernels=True) for p in ("fp32", "bf16")}
    for precision, own in whole.items():
        plain = trained(precision, "dp=1", "cuda", kernels=True, hooked=True)
        tolerance = 1e-4 if precision == "fp32" else 2e-2
        for name, want in plain["weights"].items():
            assert float((own["weights"][name] - want).norm() / want.norm()) < tolerance, (precision, name)


def test_processors_have_the_optimizers_own() -> None:
    assert trained("fp32", "dp=1", "cpu", kernels=False)["steps"] == {5.0}


def test_an_optimizer_that_was_changed_steps_itself() -> None:
    with phalanx.Engine(GPT(**SMALL), "dp=1", device="cpu") as engine:
        engine.update._known = True  # as on a GPU
        assert engine.update.in_one_pass
        engine.optimizer.step = engine.optimizer.step  # type: ignore[method-assign]
        assert not engine.update.in_one_pass


class Bad(GPT):
    def loss(self, output: Any, batch: dict[str, Any]) -> phalanx.Loss:
        found = super().loss(output, batch)
        return phalanx.Loss(found.total * torch.nan, found.count)


def test_a_step_that_is_skipped_keeps_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    with phalanx.Engine(Bad(**SMALL), "dp=1", device="cpu") as engine:
        made = Prepared([], [None], [], [], [], [], frozenset())
        monkeypatch.setattr(engine.update, "prepare", lambda: setattr(engine.update, "_prepared", made))
        assert engine.step(next(iter(engine.batches()))).skipped
        assert engine.update._prepared is None
