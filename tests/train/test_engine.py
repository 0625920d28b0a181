"""The engine in one's own loop: under torchrun unchanged, and refusing what would go wrong in silence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx import Layout, WrongUse
from phalanx.parallel.communication.traffic import Traffic
from tests.ranks import RankFailed, Ranks
from tests.tasks import Digits

OWN_LOOP = """
import json
import phalanx
from tests.tasks import Digits

for layout in ("dp=2", "fsdp=2"):  # one after another, in one job
    engine = phalanx.Engine(Digits(precision="float64"), layout, device="cpu")
    losses = [engine.step(batch).loss for batch in engine.batches()]
    if engine.environment.rank == 0:
        print(json.dumps(losses))
    engine.close()
"""


def test_a_loop_of_ones_own_runs_under_torchrun_unchanged(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(OWN_LOOP)
    here = Path(__file__).parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=variables)
    with phalanx.Engine(Digits(precision="float64"), device="cpu") as engine:
        alone = [engine.step(batch).loss for batch in engine.batches()]
    for line in done.stdout.splitlines()[-2:]:
        assert json.loads(line) == pytest.approx(alone, rel=1e-9)


def whoami(layout: str) -> tuple[int, int, bool, int]:
    with phalanx.Engine(Digits(), layout, device="cpu") as engine:
        return engine.rank, engine.world, engine.is_main, len(list(engine.model.parameters()))


def test_a_loop_of_ones_own_knows_where_it_is(ranks: Ranks) -> None:
    assert whoami("dp=1") == (0, 1, True, 4)
    assert ranks(2, whoami, "dp=2") == [(0, 2, True, 4), (1, 2, False, 4)]


def test_learning_happens() -> None:
    with phalanx.Engine(Digits(steps=120), device="cpu") as engine:
        losses = [engine.step(batch).loss for batch in engine.batches()]
        assert losses[-1] < 0.5 * losses[0]
        assert engine.evaluate()["accuracy"] > 0.6


def test_a_layout_for_more_ranks_than_there_are_is_refused() -> None:
    with pytest.raises(WrongUse, match="needs 4 ranks and there are 1"):
        phalanx.Engine(Digits(), Layout(fsdp=4))


def whole_run(optimizer: str) -> dict[str, torch.Tensor]:
    class Task(Digits):
        def optimizer(self, params):
            if optimizer == "SGD":
                return torch.optim.SGD(
                    [{"params": params[:2]}, {"params": params[2:], "lr": 0.5}], lr=0.1, momentum=0.9
                )
            return getattr(torch.optim, optimizer)(params, lr=0.1)

    layout = Layout(fsdp=dist.get_world_size()) if dist.is_initialized() else Layout()
    with phalanx.Engine(Task(precision="float64"), layout, device="cpu") as engine:
        for batch in engine.batches():
            engine.step(batch)
        return engine.whole_weights()


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "RMSprop", "NAdam", "Adafactor"])
def test_optimizers_are_sharded(ranks: Ranks, optimizer: str) -> None:
    expected = whole_run(optimizer)
    for name, found in ranks(2, whole_run, optimizer)[0].items():
        assert torch.allclose(found, expected[name], rtol=1e-9), name


def disagree(what: str) -> None:
    rank = dist.get_rank()

    class Task(Digits):
        def data(self):
            if what == "data":
                return phalanx.data.Arrays(x=np.full((40, 4), float(rank)), y=np.zeros(40, dtype=np.int64))
            return super().data()

        def model(self):
            return torch.nn.Linear(4, 3, bias=bool(rank) or what != "model")

    layout = Layout(dp=2, zero=rank + 1) if what == "layout" else Layout(dp=2)
    phalanx.Engine(Task(seed=rank if what == "settings" else 0), layout, device="cpu")


@pytest.mark.parametrize("what", ["settings", "layout", "data", "model"])
def test_ranks_that_mean_different_jobs_are_told(ranks: Ranks, what: str) -> None:
    with pytest.raises(RankFailed, match=f"the {what} of rank 1 is not that of rank 0"):
        ranks(2, disagree, what)


def agree() -> int:
    """All-gathers of the whole world before the first step."""
    traffic = Traffic()
    phalanx.Engine(Digits(), Layout(dp=2), device="cpu", traffic=traffic).close()
    return traffic.calls[dist.group.WORLD.group_desc if dist.group.WORLD else "", "all-gather"]


def test_ranks_that_mean_the_same_job_send_a_few_numbers_at_any_world_size(ranks: Ranks) -> None:
    assert ranks(2, agree) == [0, 0]


class Drawn(Digits):
    """Data that is drawn when it is asked for, nested, with a method of its own that is called ``batch``."""

    def _rows(self, n: int) -> list[dict[str, Any]]:
        class Rows(list):
            def batch(self, size: int) -> None:
                raise AssertionError

        return Rows({"y": i % 3, "deep": {"x": torch.randn(4)}} for i in range(n))

    def data(self):
        return self._rows(16)

    def held_out(self):
        return self._rows(5)

    def inputs(self, batch):
        return batch["deep"]["x"]

    def evaluate(self, output, batch):
        return {"mean": phalanx.Loss(batch["deep"]["x"].sum(), 4 * len(batch["y"]))}


def evaluated(layout: str) -> float:
    with phalanx.Engine(Drawn(precision="float64", steps=2), Layout.parse(layout), device="cpu") as engine:
        for batch in engine.batches():
            engine.step(batch)
        return engine.evaluate()["mean"]


def test_data_that_is_drawn_is_the_same_on_every_rank(ranks: Ranks) -> None:
    assert ranks(2, evaluated, "dp=2") == pytest.approx([evaluated("dp=1")] * 2, rel=1e-12)


def test_counts_may_be_less_than_one() -> None:
    class Weighted(Digits):
        def loss(self, output, batch):
            loss = phalanx.losses.cross_entropy(output, batch["y"])
            return phalanx.Loss(loss.total * 0.01, loss.count * 0.01)

    def norm(task: phalanx.Task) -> float:
        with phalanx.Engine(task, device="cpu") as engine:
            return engine.step(next(engine.batches())).grad_norm

    assert norm(Weighted()) == pytest.approx(norm(Digits()), rel=1e-5)


def test_data_without_a_length_is_refused() -> None:
    class Endless(Digits):
        def data(self):
            return iter(())

    with pytest.raises(WrongUse, match="a stream: which sample is in which step"):
        phalanx.Engine(Endless(), device="cpu")


def test_a_model_without_trainable_weights_is_refused() -> None:
    class Frozen(Digits):
        def model(self):
            return super().model().requires_grad_(False)

    with pytest.raises(WrongUse, match="no trainable weight"):
        phalanx.Engine(Frozen(), device="cpu")


def test_recompute_without_blocks_is_refused() -> None:
    class Lone(Digits):
        def model(self):
            return torch.nn.Linear(4, 3)

    with pytest.raises(WrongUse, match="recompute=full works block by block"):
        phalanx.Engine(Lone(), Layout(recompute="full"), device="cpu")
