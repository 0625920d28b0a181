"""Optimizers of whole matrices train under every layout like one device, in float64, on hostile data.

``pytest tests/train/test_matrices.py --every`` takes all layouts of 4 ranks, and of 8 some in which every two settings
meet; the suite takes a few for each optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, optim

import phalanx
from phalanx import Layout
from phalanx.prove.layouts import covering
from phalanx.train.engine import Engine
from tests.checkpoints import contents, newest, trained
from tests.layouts import every_layout
from tests.parity import HostileLanguage, HostileVision
from tests.ranks import RankFailed, Ranks
from tests.train.test_exact import Outcome, digest
from tests.train.test_parity import compare
from tests.train.test_turns import Alternating
from tests.whole_matrices import KINDS, WholeLanguage, made, whole_task

FEW = (
    "tp=2,fsdp=2", "pp=2,fsdp=2,micro_batch=4", "fsdp=2,cp=2,zero=1", "fsdp=2,cp=2,ep=2", "dp=2,tp=2",
    "fsdp=4,offload=params", "dp=2,fsdp=2,zero=2", "tp=2,pp=2,micro_batch=4",
)  # fmt: skip
MANY = (
    "fsdp=2,tp=4", "fsdp=2,tp=2,pp=2,micro_batch=4", "dp=2,fsdp=2,tp=2", "pp=2,tp=4,micro_batch=4",
    "fsdp=4,cp=2,ep=4", "fsdp=2,cp=2,tp=2,zero=2", "fsdp=2,cp=2,ep=2,pp=2,micro_batch=4", "fsdp=8,zero=1",
)  # fmt: skip
MARKS = {kind: [] if kind in ("muon", "soap") else [pytest.mark.every] for kind in KINDS}
SOME_KINDS = [pytest.param(kind, marks=MARKS[kind]) for kind in KINDS]
"""All of them under ``--every``."""


@pytest.mark.parametrize(("kind", "layouts"), [(kind, ("fsdp=4", *FEW[i::4])) for i, kind in enumerate(KINDS)])
def test_whole_matrices_are_updated_as_on_one_device(ranks: Ranks, kind: str, layouts: tuple[str, ...]) -> None:
    compare(ranks, 4, [(whole_task(kind, parsed), parsed) for parsed in map(Layout.parse, layouts)])


@pytest.mark.parametrize(("kind", "layouts"), [
    pytest.param(kind, MANY[i::4], marks=MARKS[kind]) for i, kind in enumerate(KINDS)
])  # fmt: skip
def test_on_eight_ranks(ranks: Ranks, kind: str, layouts: tuple[str, ...]) -> None:
    """Also where ranks of tp hold keys alike, and where shards of a stage speak along tp."""
    compare(ranks, 8, [(whole_task(kind, parsed), parsed) for parsed in map(Layout.parse, layouts)])


@pytest.mark.every
@pytest.mark.parametrize("world", [4, 8])
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_under_every_layout(ranks: Ranks, kind: str, experts: bool, world: int) -> None:
    layouts = list(every_layout(world, experts=experts))
    for layout in layouts if world == 4 else covering(layouts):
        compare(ranks, world, [(whole_task(kind, layout), layout)])


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_state_is_taken_up_under_other_layouts(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    """From shards to parts of shards to one device: to the bit; and trained there as if nothing had happened."""
    task = WholeLanguage(kind=kind, steps=6)
    losses = ranks(1, trained, task, "dp=1", tmp_path / "one device", None, 6)[0]
    ways = [("fsdp=4", 4, "first"), ("tp=2,fsdp=2", 4, "second"), ("pp=2,dp=2", 4, "third"), ("dp=1", 1, "last")]
    start, found = None, []
    for layout, world, name in ways:
        found += ranks(world, trained, task, layout, tmp_path / name, start, 2 if name != "last" else 0)[0]
        if start is not None:
            ranks(world, trained, task, layout, tmp_path / f"{name} again", start, 0)
            _same_bits(tmp_path / f"{name} again", start)
        start = tmp_path / name
    assert found == pytest.approx(losses, rel=1e-9)
    want, have = contents(tmp_path / "one device"), contents(tmp_path / "last")
    assert have.keys() == want.keys()
    options = [newest(tmp_path / name).manifest.facts["options"] for name in ("last", "one device")]
    assert options[0] == options[1]
    for name, tensor in have.items():
        assert torch.allclose(tensor.double(), want[name].double(), rtol=1e-7, atol=1e-9), name


def _same_bits(one: Path, other: Path) -> None:
    first, second = contents(one), contents(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.shape == second[name].shape
        assert torch.equal(tensor, second[name]), name
    assert newest(one).manifest.numbers == newest(other).manifest.numbers


def test_state_of_its_own_shape_is_in_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, trained, WholeLanguage(kind="adafactor"), "fsdp=2", tmp_path, None, 1)
    held = newest(tmp_path).manifest.tensors
    assert held["optimizer/row_var/blocks.0.feed_forward.down_proj.weight"].shape == (12, 1)
    assert held["optimizer/col_var/blocks.0.feed_forward.down_proj.weight"].shape == (1, 13)
    assert held["counters/step/blocks.0.feed_forward.down_proj.weight"].shape == ()


def resumed(task: phalanx.Task, start: Path) -> None:
    trained(task, "fsdp=2", None, start, 1)


def test_another_optimizer_does_not_go_on_from_such_state(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, trained, WholeLanguage(kind="adafactor"), "fsdp=2", tmp_path, None, 1)
    with pytest.raises(RankFailed, match=r"in a shape of its own, .* Go on with the optimizer that it was saved with"):
        ranks(2, resumed, HostileLanguage(), tmp_path)


def held(task: phalanx.Task, layout: str) -> tuple[dict[str, int], int, list[Any], int]:
    """By name what is kept of weights here, bytes of the parameters between steps, options, and what was sent."""
    with Engine(task, layout, device="cpu") as engine:
        sent = [engine.step(batch).sent for batch in islice(engine.batches(), 2)]
        numbers = {
            name: sum(value.numel() for value in engine.optimizer.state.get(weight.optimized, {}).values()
                      if isinstance(value, Tensor) and value.ndim)
            for name, weight in engine.spread.weights.items()
        }  # fmt: skip
        stand_ins = [w.optimized for w in engine.spread.weights.values() if w.optimized is not w.shard]
        assert all(p.grad is None for p in stand_ins)
        size = sum(p.untyped_storage().nbytes() for p in stand_ins)
        groups = [(g.get("calls"), [tuple(p.shape) for p in g["params"]]) for g in engine.optimizer.param_groups]
        return numbers, size, groups, sum(sent[1].values())


def test_state_stays_shared_out_and_whole_weights_are_let_go(ranks: Ranks) -> None:
    answers = ranks(4, held, WholeLanguage(kind="own"), "fsdp=2,tp=2")
    shapes = {n: p.shape for n, p in WholeLanguage().model().named_parameters() if p.requires_grad and n != "unused"}
    for name, shape in shapes.items():
        columns = max(1, shape[1:].numel() if len(shape) > 1 else shape.numel())
        assert sorted(answer[0][name] for answer in answers) == [0, 0, 0, columns], name
    assert all(size <= 8 * (len(shapes) + 1) for _, size, _, _ in answers)
    assert all(groups == answers[0][2] for _, _, groups, _ in answers)
    assert answers[0][2][0][0] == 2
    owned = [sum(numbers.values()) for numbers, _, _, _ in answers]
    assert max(owned) < 0.5 * sum(owned)


@dataclass
class Wide(WholeLanguage):
    """Weights that can be told by their shapes alone, which rows of them do not have."""

    def optimizer(self, params: Any) -> Any:
        tall = [p for p in params if p.ndim == 2 and p.shape[0] > p.shape[1]]
        assert all(p.shape in ((37, 12), (13, 12), (24, 12)) for p in tall)
        rest = [p for p in params if not any(p is other for other in tall)]
        return {"tall": optim.Muon(tall, lr=1e-2), "rest": optim.Adagrad(rest, lr=1e-2)}


def test_weights_are_chosen_by_their_whole_shape(ranks: Ranks) -> None:
    """Also where the others' optimizer has state as soon as it is made."""
    layouts = ["fsdp=4", "tp=2,fsdp=2", "pp=2,tp=2,micro_batch=8"]
    compare(ranks, 4, [(Wide(), Layout.parse(layout)) for layout in layouts])


@dataclass
class Images(HostileVision):
    """Weights of four dims."""

    def optimizer(self, params: Any) -> Any:
        return made("adafactor", list(params), self.learning_rate)


def test_convolutions(ranks: Ranks) -> None:
    compare(ranks, 2, [(Images(), Layout.parse(layout)) for layout in ("fsdp=2", "fsdp=2,zero=1")])


@dataclass
class TakingTurns(Alternating):
    def optimizer(self, params: Any) -> Any:
        own = {turn: [p for p in params if p.logical_name.startswith(turn)] for turn in ("critic", "maker")}
        return {"critic": optim.Adafactor(own["critic"], lr=1e-2), "maker": phalanx.optim.SOAP(own["maker"], lr=1e-2)}


def weights(task: phalanx.Task, layout: str) -> dict[str, Tensor]:
    with Engine(task, layout, device="cpu") as engine:
        for batch in engine.batches():
            engine.step(batch)
        return {name: tensor.clone() for name, tensor in engine.whole_weights().items()}


def test_turns(ranks: Ranks) -> None:
    alone = ranks(1, weights, TakingTurns(), "dp=1")[0]
    for name, found in ranks(2, weights, TakingTurns(), "fsdp=2")[0].items():
        assert torch.allclose(found, alone[name], rtol=1e-9), name


def exactly(task: phalanx.Task, layout: str) -> Outcome:
    with Engine(task, layout, device="cpu") as engine:
        steps = [(m.loss.hex(), m.grad_norm.hex(), m.skipped) for m in map(engine.step, engine.batches())]
        return Outcome(digest(engine.whole_weights()), steps, {})


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_exact_sums_give_the_same_bits_at_any_number_of_ranks(ranks: Ranks, kind: str) -> None:
    task = WholeLanguage(kind=kind, precision="fp32")
    alone = ranks(1, exactly, task, "exact=8")[0]
    for world, layout in ((2, "dp=2"), (2, "fsdp=2,zero=1"), (4, "fsdp=4"), (4, "dp=2,fsdp=2,zero=2")):
        assert ranks(world, exactly, task, f"{layout},exact=8") == [alone] * world, layout


@pytest.mark.parametrize("kind", ["muon", "soap"])
def test_wide_weights_of_narrow_computation_and_on_the_host(ranks: Ranks, kind: str) -> None:
    task = WholeLanguage(kind=kind, precision="bf16")
    alone = ranks(1, exactly, task, "exact=8")[0]
    for layout in ("fsdp=2,zero=1", "fsdp=2,offload=optimizer"):
        assert ranks(2, exactly, task, f"{layout},exact=8") == [alone] * 2, layout


@dataclass
class Rash(WholeLanguage):
    """Says that it updates each element by itself, which it does not."""

    kind: str = "own"

    def optimizer(self, params: Any) -> Any:
        return type("Claiming", (type(super().optimizer(params)),), {"elementwise": True})(list(params), lr=1e-2)


def test_an_optimizer_that_only_says_it_works_by_elements_is_noticed(ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match=r"Rash fsdp=2: .* in "):
        compare(ranks, 2, [(Rash(), Layout(fsdp=2))])


def lbfgs(layout: str) -> None:
    @dataclass
    class Quasi(WholeLanguage):
        def optimizer(self, params: Any) -> Any:
            return optim.LBFGS(params)

    Engine(Quasi(), layout, device="cpu")


def test_lbfgs_is_refused(ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match="LBFGS evaluates the loss many times in a step"):
        ranks(2, lbfgs, "fsdp=2")


class Eager(optim.SGD):
    """Steps by whole rows, and begins a state before it looks whether there is a gradient."""

    elementwise = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                state.setdefault("norm", torch.zeros_like(weight))
                if weight.grad is not None:
                    state["norm"] += weight.grad.norm()
                    weight -= group["lr"] * weight.grad / (1 + state["norm"])


@dataclass
class LastBlock(HostileLanguage):
    """Whole matrices in the last block alone: the stages before it have none."""

    def optimizer(self, params: Any) -> Any:
        last = f"blocks.{self.layers - 1}."
        hidden = [p for p in params if p.ndim == 2 and p.logical_name.startswith(last)]
        rest = [p for p in params if not any(p is other for other in hidden)]
        return {"hidden": Eager(hidden, lr=1e-2), "rest": optim.AdamW(rest, lr=1e-3)}


def test_a_stage_without_whole_matrices_and_an_optimizer_that_begins_state_for_all(
    ranks: Ranks, tmp_path: Path
) -> None:
    layouts = [Layout.parse(layout) for layout in ("pp=2,fsdp=2,micro_batch=4", "fsdp=4")]
    compare(ranks, 4, [(LastBlock(), layout) for layout in layouts])
    ranks(2, trained, LastBlock(), "fsdp=2", tmp_path, None, 2)
    assert any("norm" in name for name in newest(tmp_path).manifest.tensors)
