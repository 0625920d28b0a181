"""Steps that are replayed: the same bits as those that are computed as they come, alone and over NCCL."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx
from phalanx import WrongUse
from phalanx.recipes.gpt import GPT
from phalanx.train.graphs import WARM
from tests.nccl import as_host
from tests.ports import free_port

STEPS = WARM + 5
SHAPE: dict[str, Any] = {"width": 32, "layers": 2, "heads": 2, "kv_heads": 1, "length": 32, "megabytes": 0.1}
NCCL = "dp=2", "fsdp=2", "fsdp=2,zero=2,micro_batch=1", "tp=2", "cp=2"


@dataclass
class Logging(GPT):
    """Says something of each step."""

    def loss(self, output: Any, batch: dict[str, Any]) -> phalanx.Loss:
        found = super().loss(output, batch)
        phalanx.log("mean token", batch["tokens"].double().mean())
        return found


@dataclass
class Unpacked(Logging):
    """Rows of one document: those of several are attended to by another kernel where a step is not recorded."""

    def inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": batch["tokens"]}


@dataclass
class Asking(GPT):
    """Asks the GPU for a number on the way."""

    def loss(self, output: Any, batch: dict[str, Any]) -> phalanx.Loss:
        assert batch["tokens"].max().item() >= 0
        return super().loss(output, batch)


def trained(task: phalanx.Task, layout: str, device: str = "cuda") -> tuple[list[Any], dict[str, torch.Tensor], int]:
    """Losses, norms and what was logged; weights; how many graphs there are."""
    told = []
    with phalanx.Engine(task, layout, device=device) as engine:
        for batch in engine.batches():
            metrics = engine.step(batch)
            told.append((metrics.loss, metrics.grad_norm, metrics.logged, metrics.sent, metrics.count))
        weights = {name: weight.clone() for name, weight in engine.whole_weights().items()}
        return told, weights, len(engine.graphs.recorded)


def compare(task: phalanx.Task, layout: str, graphs: int = 1) -> None:
    plain, weights, none = trained(task, layout)
    replayed, others, some = trained(task, f"{layout},graphs=step")
    assert (none, some) == (0, graphs)
    assert replayed == plain
    for name, weight in weights.items():
        assert torch.equal(weight, others[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("layout", "precision"),
    [("dp=1", "float64"), ("dp=1,micro_batch=3,recompute=full", "fp32"), ("dp=1,compile=blocks", "bf16")],
)
def test_replayed_steps_are_the_same_bits(layout: str, precision: Any) -> None:
    task = Unpacked if precision == "bf16" else Logging
    compare(task(**SHAPE, steps=STEPS, global_batch=8, dropout=0.1, precision=precision), layout)


@pytest.mark.gpu
def test_batches_of_another_size_have_a_graph_of_their_own_or_none() -> None:
    samples = len(GPT(**SHAPE).data())
    batch = samples // 3 + 1  # of three batches in an epoch the last one is short
    compare(GPT(**SHAPE, steps=3 * (WARM + 2), global_batch=batch, precision="fp32"), "dp=1,micro_batch=64", graphs=2)


@pytest.mark.gpu
def test_a_step_that_asks_the_gpu_for_a_number_is_refused() -> None:
    with pytest.raises(WrongUse, match=r"Asking cannot be recorded as a CUDA graph: .*leave that out"):
        trained(Asking(**SHAPE, steps=STEPS, global_batch=8), "dp=1,graphs=step")


def _rank() -> None:
    for layout in NCCL:
        compare(GPT(**SHAPE, steps=STEPS, global_batch=8, dropout=0.1, precision="float64"), layout)


@pytest.mark.gpu
def test_collectives_are_replayed_over_nccl() -> None:
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", "from tests.train import test_graphs; test_graphs._rank()"],
            env={
                **os.environ, **as_host(rank), "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            },
            cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    told = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told


def test_a_processor_records_nothing() -> None:
    task = GPT(**SHAPE, steps=2, global_batch=4)
    plain, weights, _ = trained(task, "dp=1", "cpu")
    replayed, others, graphs = trained(task, "dp=1,graphs=step", "cpu")
    assert (graphs, replayed) == (0, plain)
    assert all(torch.equal(weight, others[name]) for name, weight in weights.items())
