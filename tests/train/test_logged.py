"""What is logged in a step: one mean over the global batch, at any number of ranks, micro-batches and stages."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx import Layout, Loss, WrongUse
from tests.comparing import Contrast
from tests.parity import PRIME, HostileLanguage
from tests.ranks import RankFailed, Ranks
from tests.tasks import Digits
from tests.test_cli import phalanx as command

Steps = list[dict[str, float]]


class Talking(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        phalanx.log("block", x[:, 0].abs().mean())
        return x + super().forward(x).tanh()


class Net(nn.Module):
    """Logs before its blocks, in them, and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(PRIME, 8)
        self.blocks = nn.ModuleList(Talking(8, 8) for _ in range(4))
        self.head = nn.Linear(8, PRIME)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        phalanx.log("before", x[:, 0].abs().mean())
        for number, block in enumerate(self.blocks):
            x = block(x)
            phalanx.log(f"between/{number}", x[:, 0].abs().mean())
        phalanx.log("after", x[:, 0].abs().mean())
        return self.head(x)


class LogsInLoss:
    """A mean of samples, a sum and a count, a mean over tokens, and one that few micro-batches have."""

    def loss(self, output: Any, batch: dict[str, Tensor]) -> Loss:
        tokens, targets = batch["tokens"], batch["targets"]
        phalanx.log("first", tokens[:, 0].double().mean())
        real = targets != -100
        phalanx.log("targets", Loss((targets * real).sum(), real.sum()))
        phalanx.log("weighted", (targets * real).sum().double() / real.sum(), count=real.sum())
        few = tokens[:, 0] == 18
        if few.any():
            phalanx.log("few", targets[few, 1].double().mean(), count=int(few.sum()))
        phalanx.log("none", math.nan, count=0)
        return super().loss(output, batch)  # type: ignore[misc]


@dataclass
class Logging(LogsInLoss, HostileLanguage):
    """Batches of 31 of 47 samples of unequal length: nothing is even."""

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        phalanx.log("given", batch["tokens"][:, 1].double().mean())
        return {"tokens": batch["tokens"]}


@dataclass
class Everywhere(Logging):
    def model(self) -> nn.Module:
        return Net()


@dataclass
class LogsTwice(LogsInLoss, Contrast):
    """The loss needs all micro-batches at once, so that model and loss are computed several times."""


def steps(task: phalanx.Task, layout: str) -> Steps:
    with phalanx.Engine(task, Layout.parse(layout), device="cpu") as engine:
        found = [engine.step(batch).logged for batch in engine.batches()]
        if task.held_out() is not None:
            engine.evaluate()
        return found


def by_hand(task: HostileLanguage) -> Steps:
    """From the samples alone."""
    with phalanx.Engine(task, device="cpu") as engine:
        every = [[engine.task.data()[int(i)] for i in engine.order.ids(step)] for step in range(task.steps)]
    found = []
    for samples in every:
        tokens = [sample["tokens"] for sample in samples]
        targets = torch.cat([sample["targets"] for sample in samples])
        few = [sample["targets"][1].item() for sample in samples if sample["tokens"][0] == 18]
        real = targets[targets != -100].double()
        found.append(
            {
                "first": sum(t[0].item() for t in tokens) / len(tokens),
                "targets": real.mean().item(),
                "weighted": real.mean().item(),
                "few": sum(few) / len(few) if few else None,
            }
        )
    return [{name: value for name, value in step.items() if value is not None} for step in found]


def same(found: Steps, expected: Steps, **how: Any) -> None:
    assert [sorted(step) for step in found] == [sorted(step) for step in expected]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, **(how or {"rel": 1e-9}))


def test_they_are_means_over_the_global_batch() -> None:
    task = Logging()
    expected = by_hand(task)
    assert any("few" in step for step in expected)
    assert not all("few" in step for step in expected), "one step must have none, or nothing is shown"
    for layout in ("dp=1", "micro_batch=7"):
        found = steps(task, layout)
        same([{name: value for name, value in step.items() if name != "given"} for step in found], expected)


@pytest.mark.parametrize(
    ("world", "layout"),
    [(2, "dp=2"), (2, "fsdp=2,micro_batch=5"), (2, "tp=2"), (2, "cp=2,micro_batch=9"), (3, "dp=3,micro_batch=2")],
)
def test_any_layout_gives_the_same(ranks: Ranks, world: int, layout: str) -> None:
    expected = steps(Logging(), "dp=1")
    for found in ranks(world, steps, Logging(), layout):
        same(found, expected)


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (1, "micro_batch=4,recompute=full"),
        (1, "dp=1,recompute=selective"),
        (2, "pp=2"),
        (2, "pp=2,micro_batch=8"),
        (2, "pp=2,schedule=interleaved,micro_batch=8"),
        (4, "dp=2,pp=2,micro_batch=4,schedule=zb"),
        (2, "fsdp=2,recompute=full"),
    ],
)
def test_what_the_model_logs_reaches_all_ranks_from_every_stage(ranks: Ranks, world: int, layout: str) -> None:
    expected = steps(Everywhere(), "dp=1")
    assert {"before", "block", "between/0", "between/3", "after", "given", "first"} <= expected[0].keys()
    for found in ranks(world, steps, Everywhere(), layout):
        same(found, expected)


def test_exact_runs_have_the_same_bits(ranks: Ranks) -> None:
    (expected,) = ranks(1, steps, Everywhere(), "dp=1,exact=8")
    same(expected, steps(Everywhere(), "dp=1"))
    assert all(found == expected for found in ranks(4, steps, Everywhere(), "dp=2,fsdp=2,exact=8"))


def test_a_loss_that_is_computed_several_times_logs_once(ranks: Ranks) -> None:
    expected = steps(LogsTwice(), "dp=1")
    for layout in ("dp=2,micro_batch=5", "dp=2"):
        for found in ranks(2, steps, LogsTwice(), layout):
            same(found, expected)


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Talking(4, 4) for _ in range(2))
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


@dataclass
class CompiledDigits(Digits):
    precision: str = "float64"
    steps: int = 12

    def model(self) -> nn.Module:
        return Compiled()


COMPARE = """
import phalanx, torch
from tests.train.test_logged import CompiledDigits, same, steps

torch.set_num_threads(1)
programs, plain = [], torch.compile

def backend(graph, inputs):
    programs.append(graph)
    return graph.forward

torch.compile = lambda rest: plain(rest, backend=backend)
expected = steps(CompiledDigits(), "dp=1")
assert len({step["block"] for step in expected}) == len(expected)
with phalanx.Engine(CompiledDigits(), "dp=1,compile=blocks", device="cpu") as engine:
    found, made = [], []
    for batch in engine.batches():
        found.append(engine.step(batch).logged)
        made.append(len(programs))
same(found, expected)
assert made[1] == made[-1] > 1, made  # that the first step has made are used in all others
"""


def test_compiled_blocks_log_in_every_step() -> None:
    done = subprocess.run([sys.executable, "-c", COMPARE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@dataclass
class Apart(Digits):
    """Names follow from the samples, so that ranks and steps have other ones."""

    samples: int = 16
    steps: int = 3
    many: bool = False

    def loss(self, output: Tensor, batch: dict[str, Any]) -> Loss:
        for value in batch["x"][:, 0].tolist():
            phalanx.log(f"x {value * 1000 if self.many else round(value):.0f}", value, count=1)
        return super().loss(output, batch)


def test_ranks_may_log_under_other_names(ranks: Ranks) -> None:
    expected = steps(Apart(), "dp=1")
    assert len({tuple(sorted(step)) for step in expected}) > 1, "steps have the same names, and show nothing"
    for layout in ("dp=2", "fsdp=2,micro_batch=1", "dp=2,exact=4"):
        for found in ranks(2, steps, Apart(), layout):
            same(found, expected, rel=1e-12)


def test_after_the_first_step_nothing_more_is_sent(ranks: Ranks) -> None:
    plain, logging = (ranks(2, calls, task, "dp=2")[0] for task in (Digits(), CountedDigits()))
    assert plain[1:] == logging[1:]
    assert sum(plain[0].values()) < sum(logging[0].values())


@dataclass
class CountedDigits(Digits):
    def loss(self, output: Tensor, batch: dict[str, Any]) -> Loss:
        phalanx.log("accuracy", (output.argmax(1) == batch["y"]).double().mean())
        return super().loss(output, batch)


def calls(task: phalanx.Task, layout: str) -> list[dict[Any, int]]:
    """Collectives of each step, by kind."""
    with phalanx.Engine(task, Layout.parse(layout), device="cpu") as engine:
        found = []
        for batch in engine.batches():
            before = engine.traffic.calls.copy()
            engine.step(batch)
            found.append(dict(engine.traffic.calls - before))
        return found


def test_too_many_names_are_refused(ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match=r"more than 256 names by step \d+.*Use the same names in every step"):
        ranks(2, steps, Apart(samples=1200, global_batch=400, many=True), "dp=2")


@pytest.mark.parametrize("method", ["on_step", "before_update"])
def test_a_callback_is_told_that_it_logs_nothing(method: str) -> None:
    class Logs(phalanx.Callback):
        pass

    setattr(Logs, method, lambda self, *given: phalanx.log("mine", 1.0))

    class Task(Digits):
        def callbacks(self) -> list[phalanx.Callback]:
            return [Logs()]

    with pytest.raises(WrongUse, match=r"phalanx\.log\('mine'\) in a callback is not of a micro-batch"):
        steps(Task(), "dp=1")


def test_the_screen_and_the_events_have_them(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(
        "from tests.train.test_logged import CountedDigits\nclass Mine(CountedDigits):\n    pass\n"
    )
    done = command("train", "task.py", "--steps", "3", "--on", "local:2", "--run", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "accuracy 0." in done.stdout
    lines = (tmp_path / "run" / "events" / "rank-00000.jsonl").read_text().splitlines()
    noted = [event["logged"]["accuracy"] for event in map(json.loads, lines) if event["kind"] == "step"]
    assert len(noted) == 3
    assert all(0 <= value <= 1 and value * 8 == round(value * 8) for value in noted)


def test_a_name_that_cannot_be_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(
        "import phalanx\nfrom tests.tasks import Digits\nclass Mine(Digits):\n"
        "    def loss(self, output, batch):\n"
        "        phalanx.log('loss', 1)\n        return super().loss(output, batch)\n"
    )
    done = command("train", "task.py", "--steps", "3", "--run", "run", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "the name of one of the step's own numbers" in done.stderr
