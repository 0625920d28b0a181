"""Steps that take turns train like two loops written by hand, at any number of ranks, and go on to the same bits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import phalanx
from phalanx import Layout, Run
from phalanx.data.order import Order
from phalanx.parallel.weights.blueprint import Blueprint
from phalanx.train.guard import Guard
from tests.ranks import Ranks
from tests.test_cli import phalanx as run_phalanx

GAN = Path(__file__).parents[2] / "examples" / "gan.py"
RATES = {"critic": lambda step: 1 / (1 + step), "maker": lambda step: 0.5}


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 2))
        self.critic = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, noise: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        return self.critic(self.maker(noise)), self.critic(real)


@dataclass
class Alternating(phalanx.Task):
    """Two turns of a critic, then one of what it judges; two optimizers, two schedules, clipped."""

    global_batch: int = 7
    steps: int = 8
    precision: phalanx.task.Precision = "float64"
    clip: float = 0.05
    mistake: str = ""

    turns = ("critic", "critic", "maker")

    def model(self) -> nn.Module:
        return Pair()

    def data(self) -> phalanx.data.Arrays:
        draw = torch.Generator().manual_seed(0)
        return phalanx.data.Arrays(
            noise=torch.randn(17, 3, generator=draw), real=torch.randn(17, 2, generator=draw) * 5 + 3
        )

    def inputs(self, batch: dict[str, Any]) -> Any:
        return batch["noise"], batch["real"]

    def loss(self, output: Any, batch: Any) -> phalanx.Loss:
        return phalanx.Loss(criterion(batch.turn, *output), len(batch["real"]))

    def optimizer(self, params: Any) -> Any:
        if self.mistake == "shared":
            return {"one": torch.optim.SGD(params), "two": torch.optim.SGD(params)}
        if self.mistake == "no optimizer":
            return {"one": torch.optim.SGD(params), "two": None}
        return optimizers({p.logical_name: p for p in params})

    def schedule(self) -> Any:
        if self.turns != Alternating.turns:
            return RATES["maker"]
        return RATES if self.mistake != "schedule" else {"critic": RATES["critic"]}


def criterion(turn: str, fake: Tensor, real: Tensor) -> Tensor:
    return F.softplus(-fake).sum() if turn == "maker" else F.softplus(fake).sum() + F.softplus(-real).sum()


def optimizers(weights: dict[str, Any]) -> dict[str, torch.optim.Optimizer]:
    own = {turn: [p for name, p in weights.items() if name.startswith(turn)] for turn in ("critic", "maker")}
    return {
        "critic": torch.optim.Adam(own["critic"], lr=1e-2, betas=(0.5, 0.9), weight_decay=0.1),
        "maker": torch.optim.SGD(own["maker"], lr=3e-2, momentum=0.9),
    }


def by_hand(task: Alternating) -> dict[str, Tensor]:
    blueprint = Blueprint(task.model, task.seed)
    model = Pair().double()
    for (_, weight), (_, drawn) in zip(model.named_parameters(), blueprint.model.named_parameters(), strict=True):
        weight.data.copy_(blueprint.value(drawn, "cpu"))
    both, data = optimizers(dict(model.named_parameters())), task.data()
    order = Order(len(data), task.global_batch, task.seed)
    for step in range(task.steps):
        turn = ("critic", "critic", "maker")[step % 3]
        samples = [data[int(index)] for index in order.ids(step)]
        noise, real = (torch.stack([torch.as_tensor(s[n]) for s in samples]).double() for n in ("noise", "real"))
        model.zero_grad()
        (criterion(turn, *model(noise, real)) / len(samples)).backward()
        own = [p for group in both[turn].param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(own, task.clip)  # not by the norm of what is not trained now
        for group, rate in zip(both[turn].param_groups, ({"critic": 1e-2, "maker": 3e-2}[turn],), strict=True):
            group["lr"] = rate * RATES[turn](step)
        both[turn].step()
    return {name: weight.detach() for name, weight in model.named_parameters()}


def trained(layout: str) -> tuple[dict[str, Tensor], list[str]]:
    with phalanx.Engine(Alternating(), Layout.parse(layout), device="cpu") as engine:
        turns = [engine.step(batch).turn for batch in engine.batches()]
        return {name: weight.clone() for name, weight in engine.whole_weights().items()}, turns


@pytest.mark.parametrize("layout", ["dp=1", "dp=2", "fsdp=4", "fsdp=2,zero=1,micro_batch=1", "dp=2,fsdp=2,zero=2"])
def test_turns_train_like_a_loop_by_hand(ranks: Ranks, layout: str) -> None:
    want = by_hand(Alternating())
    for found, turns in ranks(Layout.parse(layout).world, trained, layout):
        assert turns == ["critic", "critic", "maker"] * 2 + ["critic", "critic"]
        for name, weight in want.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-9, atol=1e-12)


class Named(Alternating):
    """Each turn has losses of its own, of which the maker's have different counts."""

    def loss(self, output: Any, batch: Any) -> phalanx.Loss:
        (fake, real), count = output, len(batch["real"])
        if batch.turn == "maker":
            adversarial = phalanx.Loss(F.softplus(-fake).sum(), count)
            return phalanx.losses.sum(adversarial=adversarial, size=phalanx.Loss(0 * fake.sum(), 3 * count))
        return phalanx.losses.sum(
            real=phalanx.Loss(F.softplus(-real).sum(), count), fake=phalanx.Loss(F.softplus(fake).sum(), count)
        )


def trained_by_name(layout: str) -> tuple[dict[str, Tensor], list[list[str]]]:
    with phalanx.Engine(Named(), Layout.parse(layout), device="cpu") as engine:
        names = [list(engine.step(batch).losses) for batch in engine.batches()]
        return {name: weight.clone() for name, weight in engine.whole_weights().items()}, names


@pytest.mark.parametrize("layout", ["dp=1", "micro_batch=3", "dp=2", "fsdp=2,micro_batch=1"])
def test_every_turn_has_its_own_names(ranks: Ranks, layout: str) -> None:
    want, critic, maker = by_hand(Alternating()), ["real", "fake"], ["adversarial", "size"]
    for found, names in ranks(Layout.parse(layout).world, trained_by_name, layout):
        assert names == [critic, critic, maker] * 2 + [critic, critic]
        for name, weight in want.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-9, atol=1e-12)


def test_what_cannot_work_is_refused() -> None:
    class Misnamed(Alternating):
        turns = ("critic", "makers")

    class Forgotten(Alternating):
        turns = ("critic",)

    for task, guard, words in (
        (Misnamed(), None, "turn 'makers' of Misnamed trains no weight"),
        (Forgotten(), None, r"maker.0.weight and 3 other weights of Forgotten have no turn"),
        (Alternating(mistake="shared"), None, "share weights"),
        (Alternating(mistake="no optimizer"), None, "gave for 'two' a NoneType"),
        (Alternating(mistake="schedule"), None, "Give a function for each turn"),
        (Alternating(), Guard(spike=3.0), "Leave it out"),
    ):
        with pytest.raises(phalanx.WrongUse, match=words):
            phalanx.Engine(task, device="cpu", guard=guard)


def check_losses(text: str, run: Run) -> None:
    """Each turn's are told apart: the last of each while it runs, and how they went at the end."""
    for turn in ("discriminator", "generator"):
        losses = [event["loss"] for event in run.events(0, "step") if event["turn"] == turn]
        first, *_, last = losses
        assert re.search(rf"^ *{turn} {first:.4f} \S+ {last:.4f}$", text, re.MULTILINE), text
        assert re.search(rf"step \d+/\d+ .* {turn} {last:.4f}  .* samples/s", text), text
    assert not re.search(r"\bloss \d", text), text


def test_a_run_that_takes_turns_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    words = ("train", str(GAN), "--layout", "fsdp=2", "--set", "width=8")
    for folder, more in (("whole", ("--steps", "9")), ("half", ("--steps", "4"))):
        done = run_phalanx(*words, *more, "--run", str(tmp_path / folder), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        check_losses(done.stdout, Run(tmp_path / folder))
    done = run_phalanx("train", "--resume", "--run", str(tmp_path / "half"), "--steps", "9", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    whole, half = (load_file(Run(tmp_path / folder).weights_path) for folder in ("whole", "half"))
    assert all(torch.equal(whole[name], half[name]) for name in whole)
    steps = [event["turn"] for event in Run(tmp_path / "half").events(0, "step")]
    assert steps == ["discriminator", "generator"] * 4 + ["discriminator"]
