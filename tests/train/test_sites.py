"""Sites that train by themselves: held to a loop by hand, tensor by tensor; what crosses them, and when."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import phalanx
from phalanx.data.order import Order, share
from phalanx.errors import WrongUse
from phalanx.layout import Layout
from phalanx.parallel.forward.wrapper import wrap
from phalanx.parallel.randomness.answers import Answers
from phalanx.parallel.randomness.draws import Moment, RandomKeys, Randomness
from phalanx.parallel.weights.blueprint import Blueprint
from tests.parity import TOLERANCE, HostileLanguage, HostileVision
from tests.ranks import Ranks
from tests.tasks import Digits

STEPS = 7


class Site:
    """One site of a run by hand: a model and an optimizer of its own."""

    def __init__(self, task: HostileLanguage) -> None:
        blueprint = Blueprint(task.model, task.seed)
        self.task, self.model = task, task.model().double()
        for name, weight in self.model.named_parameters():
            weight.data.copy_(blueprint.value(dict(blueprint.model.named_parameters())[name], "cpu"))
        self.moment = Moment()
        self.randomness = Randomness(task.seed, self.moment, torch.device("cpu"))
        self.randomness.answers = Answers(self.randomness)
        for name in task.anatomy(self.model).blocks:
            wrap(self.model.get_submodule(name), RandomKeys(name, self.randomness))
        self.weights = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        for name, weight in self.weights.items():
            weight.logical_name = name
        self.optimizer = task.optimizer(list(self.weights.values()))
        self.rate = self.optimizer.param_groups[0]["lr"]

    def step(self, step: int, ranges: list[tuple[int, int]], order: Order) -> float:
        data, total, count = self.task.data(), 0.0, 0
        for start, stop in ranges:
            batch = self.task.collate([data[int(i)] for i in order.ids(step, start, stop)])
            self.moment.step, self.moment.slots = step, np.arange(start, stop)
            with self.randomness.scope("task"):
                loss = self.task.loss(self.model(**self.task.inputs(batch)), batch)
            loss.total.backward()
            total, count = total + loss.total.item(), count + int(loss.count)
        for weight in self.weights.values():
            if weight.grad is not None:
                weight.grad.div_(count)
        torch.nn.utils.clip_grad_norm_(list(self.weights.values()), self.task.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * self.task.schedule()(step)
        self.optimizer.step()
        self.model.zero_grad()
        return total / count


@torch.no_grad()
def agree(sites: list[Site], names: list[str], agreed: dict, velocity: dict, rate: float, momentum: float) -> None:
    """An outer step of some weights, from what each site sent of them."""
    for name in names:
        change = torch.stack([agreed[name] - site.sent[name] for site in sites]).mean(0)
        velocity[name] = momentum * velocity.get(name, 0) + change
        agreed[name] = agreed[name] - rate * (change + momentum * velocity[name])


def by_hand(task: HostileLanguage, layout: str, ends: int = STEPS) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Losses by site, and the weights at the end, after so many steps."""
    spread = Layout.parse(layout)
    local = spread.local
    assert local is not None
    rate, momentum = (1.0, 0.0) if local.method == "local" else (0.9, 0.2)
    sites, order = [Site(task) for _ in range(spread.dp)], Order(len(task.data()), task.global_batch, task.seed)
    agreed = {name: weight.detach().clone() for name, weight in sites[0].weights.items()}
    velocity: dict[str, Tensor] = {}
    losses: list[list[float]] = [[] for _ in sites]
    names, total = list(agreed), sum(weight.numel() for weight in agreed.values())
    middles = torch.tensor([agreed[name].numel() for name in names]).double()
    middles = (middles.cumsum(0) - middles / 2) / total * local.fragments
    parts = [[n for n, m in zip(names, middles, strict=True) if int(m) == p] for p in range(local.fragments)]
    for step in range(ends):
        for number, site in enumerate(sites):
            ranges = share(order.slots(step), 1, spread.dp, number)
            losses[number].append(site.step(step, ranges, order))
        place, last = step % local.every + 1, step + 1 == ends
        for part, own in enumerate(parts):
            arrives = (part + 1) * local.every // local.fragments
            if place == arrives - local.overlap or (last and not arrives - local.overlap <= place <= arrives):
                for site in sites:
                    site.sent = {**getattr(site, "sent", {}), **{n: site.weights[n].detach().clone() for n in own}}
            if place == arrives or last:
                agree(sites, own, agreed, velocity, rate, momentum)
                for name in own:
                    since = [site.weights[name].detach() - site.sent[name] for site in sites]
                    if last:
                        agreed[name] = agreed[name] + torch.stack(since).mean(0)
                    for site, change in zip(sites, since, strict=True):
                        site.weights[name].data.copy_(agreed[name] if last else agreed[name] + change)
    return losses, agreed


def spread_run(task: phalanx.Task, layout: str) -> tuple[int, list[float], dict[str, Tensor], list[Any]]:
    with phalanx.Engine(task, layout, device="cpu") as engine:
        found = [engine.step(batch) for batch in engine.batches()]
        weights = {name: tensor.clone() for name, tensor in engine.whole_weights().items()}
        return engine.mesh.index("dp"), [one.loss for one in found], weights, [one.round for one in found]


LAYOUTS = (
    "dp=2,comm=local:2", "dp=2,comm=diloco:3", "dp=3,comm=diloco:2", "dp=2,fsdp=2,comm=diloco:2",
    "dp=2,tp=2,comm=local:3", "dp=2,pp=2,comm=diloco:2", "dp=2,comm=diloco:4:fragments=2",
    "dp=2,comm=diloco:4:fragments=2:overlap=1", "dp=2,fsdp=2,zero=1,comm=local:3:overlap=2",
    "dp=2,comm=diloco:4:overlap=2",  # what left after step 6 is on its way when the run ends
)  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_trains_as_the_loop_by_hand(ranks: Ranks, layout: str) -> None:
    task = HostileLanguage(steps=STEPS)
    losses, weights = by_hand(task, layout)
    for site, found, after, _ in ranks(Layout.parse(layout).world, spread_run, task, layout):
        assert found == pytest.approx(losses[site], rel=TOLERANCE)
        for name, want in weights.items():
            assert float((after[name] - want).norm() / (want.norm() + 1e-3)) < TOLERANCE, name


def counted(layout: str) -> list[tuple[int, dict[str, int]]]:
    """By step, how many collectives left a site, and bytes by axis."""
    with phalanx.Engine(Digits(width=64, steps=8), layout, device="cpu") as engine:
        found = []
        names = {engine.mesh.group("dp").name, engine.mesh.world.name} - {engine.spread.mesh.world.name}
        for batch in engine.batches():
            before = engine.traffic.calls.copy()
            metrics = engine.step(batch)
            calls = engine.traffic.calls - before
            found.append((sum(number for (axis, _), number in calls.items() if axis in names), metrics.sent))
        return found


@pytest.mark.parametrize("layout", ["dp=2,comm=local:4", "dp=2,fsdp=2,comm=diloco:4:int4"])
def test_no_message_leaves_a_site_in_between(ranks: Ranks, layout: str) -> None:
    for found in ranks(Layout.parse(layout).world, counted, layout):
        assert [bool(calls) for calls, _ in found] == [False] * 3 + [True] + [False] * 3 + [True]
        assert [bool(sent.get("dp")) for _, sent in found] == [False] * 3 + [True] + [False] * 3 + [True]


def behind(layout: str, lag: int, folder: Path) -> int:
    """The second site begins no round before the first one has done so many steps of it."""
    with phalanx.Engine(Digits(steps=12), layout, device="cpu", timeout=timedelta(seconds=30)) as engine:
        for batch in engine.batches():
            ahead = folder / str(engine.step_number + lag)
            if engine.rank == 1 and engine.step_number % 4 == 0:
                deadline = time.monotonic() + 20
                while not ahead.exists():
                    assert time.monotonic() < deadline, f"the first site waits before its step {ahead.name} is done"
                    time.sleep(0.01)
            engine.step(batch)
            if engine.rank == 0:
                (folder / str(engine.step_number)).touch()
        return engine.step_number


@pytest.mark.parametrize("comm", ["local:4:overlap=3", "diloco:4:int4:overlap=3"])
def test_a_site_may_be_behind_by_as_many_steps_as_overlap(ranks: Ranks, tmp_path: Path, comm: str) -> None:
    assert ranks(2, behind, f"dp=2,comm={comm}", 3, tmp_path) == [12, 12]


class Ending(phalanx.Callback):
    """One rank alone ends the run."""

    def __init__(self, when: int) -> None:
        self.when = when

    def on_step(self, engine: phalanx.Engine, metrics: Any) -> None:
        if engine.rank == 1 and metrics.step + 1 == self.when:
            engine.stop("enough")


def asked(when: int) -> tuple[list[int], list[bool]]:
    """A callback of one site alone ends the run: all ranks hear of it together."""
    with phalanx.Engine(Digits(steps=12), "dp=2,comm=diloco:4", device="cpu") as engine:
        engine.callbacks.add(Ending(when))
        told, heard = [], []
        for batch in engine.batches():
            found = engine.step(batch).round
            if found is not None:
                told.append(engine.step_number)
                heard.append(found.signals.finish)
                assert engine.just_agreed == range(engine.step_number - 3, engine.step_number + 1)
            else:
                assert not engine.just_agreed
        return told, heard


def test_what_one_rank_wants_all_hear_where_sites_agree(ranks: Ranks) -> None:
    assert ranks(2, asked, 5) == [([4, 8, 12], [False, True, True])] * 2


def ended_early(layout: str, when: int) -> tuple[int, dict[str, Tensor], dict[str, Tensor]]:
    """Where a run of more steps ended; what this site has of weights, and what all have agreed on."""
    with phalanx.Engine(HostileLanguage(steps=STEPS), layout, device="cpu") as engine:
        engine.callbacks.add(Ending(when))
        for batch in engine.batches():
            found = engine.step(batch).round
            if found is not None and found.signals.finish:
                break
        own = {name: tensor.clone() for name, tensor in engine.spread.whole.state()}
        return engine.step_number, own, engine.whole_weights()


@pytest.mark.parametrize(
    "comm", ["diloco:4", "diloco:4:fragments=2", "diloco:4:fragments=2:overlap=1", "local:4:overlap=2"]
)
def test_a_run_that_is_ended_early_ends_as_at_its_last_step(ranks: Ranks, comm: str) -> None:
    layout = f"dp=2,comm={comm}"
    _, want = by_hand(HostileLanguage(steps=STEPS), layout, ends=4)
    for step, own, agreed in ranks(2, ended_early, layout, 1):
        assert step == 4
        for name, value in want.items():
            assert torch.equal(own[name], agreed[name]), name
            assert float((own[name] - value).norm() / (value.norm() + 1e-3)) < TOLERANCE, name


def in_between() -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """What a site has of weights two steps after all had agreed; the whole ones then, and as they were agreed on."""
    with phalanx.Engine(Digits(steps=8), "dp=2,fsdp=2,comm=diloco:4", device="cpu") as engine:
        for batch in engine.batches():
            engine.step(batch)
            if engine.step_number == 4:
                agreed = {name: tensor.clone() for name, tensor in engine.whole_weights().items()}
            if engine.step_number == 6:
                return dict(engine.spread.whole.state()), engine.whole_weights(), agreed
    raise AssertionError


def test_whole_weights_are_those_that_all_have_agreed_on(ranks: Ranks) -> None:
    for own, whole, agreed in ranks(4, in_between):
        assert whole.keys() == agreed.keys() == own.keys()
        for name, want in agreed.items():
            assert torch.equal(whole[name], want)
            assert not torch.equal(own[name], want)


def test_a_round_tells_of_all_sites(ranks: Ranks) -> None:
    answers = ranks(2, spread_run, Digits(steps=6), "dp=2,comm=local:3")
    losses = [answer[1] for answer in answers]
    for _, _, _, rounds in answers:
        assert [found is None for found in rounds] == [True, True, False] * 2
        want = sum(sum(own[:3]) for own in losses) / 6
        assert rounds[2].loss == pytest.approx(want)
        assert (rounds[2].count, rounds[2].skipped, rounds[2].bad) == (24, 0, "")


def test_a_bad_step_is_its_sites_own(ranks: Ranks) -> None:
    answers = ranks(2, spread_run, Digits(steps=8, spoil=3), "dp=2,comm=local:4")
    bad = [[not np.isfinite(loss) for loss in losses] for _, losses, _, _ in answers]
    assert sum(map(sum, bad)) == 2  # once an epoch of five steps
    assert [rounds[3].skipped + rounds[7].skipped for *_, rounds in answers] == [2, 2]
    told = [answers[0][3][step].bad for step in (3, 7)]
    assert (
        "bad numbers in 2 steps of sites since step 5" in told or "bad numbers in 1 step of sites since step 1" in told
    )
    for name in answers[0][2]:
        assert torch.equal(answers[0][2][name], answers[1][2][name])
        assert answers[0][2][name].isfinite().all()


def told_of(task: phalanx.Task, layout: str, when: int) -> tuple[list[Any], list[Any], float, int | None]:
    """A site's steps and rounds, terms that were counted, and the last good step."""
    with phalanx.Engine(task, layout, device="cpu") as engine:
        engine.callbacks.add(Ending(when))
        found = []
        for batch in engine.batches():
            found.append(engine.step(batch))
            if found[-1].round is not None and found[-1].round.signals.finish:
                break
        return found, [one.round for one in found if one.round is not None], engine.terms, engine.good


@pytest.mark.parametrize(
    ("comm", "when"), [("local:4:overlap=2", 0), ("diloco:3:fragments=2", 0), ("local:4:overlap=2", 1), ("local:16", 0)]
)
@pytest.mark.parametrize("bad", [1, 3])
def test_rounds_tell_of_every_step_once(ranks: Ranks, comm: str, when: int, bad: int) -> None:
    """A bad step before something was told, or after: of a run that ends where sites agree or not, or early."""
    task = Digits(steps=8, samples=80)
    task.spoil = int(Order(80, 8, task.seed).ids(bad)[-1])
    answers = ranks(2, told_of, task, f"dp=2,comm={comm}", when)
    steps = [step for found, *_ in answers for step in found]
    good = [step for step in steps if not step.skipped]
    for _, rounds, terms, _ in answers:
        assert sum(found.skipped for found in rounds) == 1
        assert sum("bad numbers in 1 step of sites" in found.bad for found in rounds) == 1
        assert sum(found.count for found in rounds) == sum(step.count for step in good)
        total = sum(found.loss * found.count for found in rounds if found.count)
        assert total == pytest.approx(sum(step.loss * step.count for step in good))
        assert terms == sum(step.count for step in steps)
        assert rounds[-1].ended_badly == (steps[-1].step == bad)


class Blank(Digits):
    """What one site's samples are is not known in the first four steps."""

    def data(self) -> phalanx.data.Arrays:
        order, found = Order(self.samples, self.global_batch, self.seed), super().data()
        for step in range(4):
            found.columns["y"][order.ids(step)[4:]] = -100
        return found


def test_a_site_without_terms_has_done_nothing_bad(ranks: Ranks) -> None:
    answers = ranks(2, told_of, Blank(steps=4, samples=80), "dp=2,comm=local:4", 0)
    assert [all(step.skipped for step in found) for found, *_ in answers] == [False, True]
    for _, (found,), _, good in answers:
        assert (good, found.bad, found.count, found.skipped, found.ended_badly) == (3, "", 16, 4, 0)


def callbacks_state(own: list[dict[str, Any]]) -> tuple[dict[str, Any], int]:
    with phalanx.Engine(Digits(), "dp=2,comm=local:4", device="cpu", timeout=timedelta(seconds=20)) as engine:
        assert engine.sites is not None
        found = engine.sites.as_the_first(own[engine.rank])
        return found, len(engine.mesh.world.all_gather_words(["after it"]))


@pytest.mark.parametrize("own", [[{}, {"a": 1}], [{"a": 1}, {}]])
def test_callbacks_have_what_they_have_on_the_first_rank(ranks: Ranks, own: list[dict[str, Any]]) -> None:
    assert ranks(2, callbacks_state, own) == [(own[0], 2)] * 2


def evaluated(layout: str, steps: int) -> tuple[dict[str, float], dict[str, float]]:
    with phalanx.Engine(Digits(steps=8), layout, device="cpu") as engine:
        for batch in engine.batches():
            engine.step(batch)
            if engine.step_number == steps:
                break
        found = engine.evaluate()
        assert engine.spread.outer is not None
        engine.spread.outer.rest()
        engine.spread.updated()
        return found, engine.evaluate()


@pytest.mark.parametrize(("layout", "steps"), [("dp=2,comm=local:4", 3), ("dp=2,comm=local:4:fragments=2", 4)])
def test_an_evaluation_is_of_what_all_agreed_on(ranks: Ranks, layout: str, steps: int) -> None:
    for found, want in ranks(2, evaluated, layout, steps):
        assert found == want


def averaged() -> dict[str, Tensor]:
    task = HostileVision(steps=4)
    with phalanx.Engine(task, "dp=2,comm=local:2", device="cpu") as engine:
        for batch in engine.batches():
            engine.step(batch)
        return {name: buffer.clone() for name, buffer in engine.model.named_buffers()}


def test_running_means_are_averaged(ranks: Ranks) -> None:
    one, other = ranks(2, averaged)
    assert any("running_mean" in name for name in one)
    assert all(torch.equal(one[name], other[name]) for name in one)


def refused(layout: str, **changes: Any) -> str:
    try:
        with phalanx.Engine(Averaged(**changes), layout, device="cpu"):
            return ""
    except WrongUse as error:
        return str(error)


@dataclass
class Averaged(Digits):
    ema: bool = False
    freeze: bool = False

    def callbacks(self) -> list[phalanx.Callback]:
        return [
            *([phalanx.EMA(0.9)] if self.ema else []),
            *([phalanx.Freeze("0.*", since=3)] if self.freeze else []),
        ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ema": True}, "EMA keeps tensors of weights after every step"),
        ({"precision": "fp16"}, "Use precision=bf16"),
        ({"freeze": True}, "Use momentum=0, or comm=local:4"),
    ],
)
def test_what_every_step_would_have_to_agree_on_is_refused(ranks: Ranks, changes: dict[str, Any], words: str) -> None:
    for told in ranks(2, partial(refused, **changes), "dp=2,comm=diloco:4"):
        assert words in told
