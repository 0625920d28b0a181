"""Evaluation is part of a proof: right layouts are equal, a mistake is named, what rounding decides is left out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx.prove.proof import prove
from phalanx.prove.reference.evaluation import Measures, in_words, off_by
from tests.prove.tasks import Plain, Points, Scaled


@dataclass
class Measured(Plain):
    """Sums, rows and words."""

    def held_out(self) -> Any:
        return Points()

    def evaluate(self, output: Tensor, batch: dict[str, Any]) -> dict[str, Any]:
        right = (output.argmax(1) == batch["y"]).sum()
        return {
            "loss": self.loss(output, batch), "accuracy": phalanx.Loss(right, len(output)), "scores": output,
            "label": batch["y"], "words": [f"{int(y)}" for y in batch["y"]],
        }  # fmt: skip

    def summarise(self, gathered: dict[str, Any]) -> dict[str, float]:
        return {"largest": gathered["scores"].max(), "words": len(set(gathered["words"]))}


@dataclass
class Averaged(Measured):
    """A mean of means."""

    def evaluate(self, output: Tensor, batch: dict[str, Any]) -> dict[str, Any]:
        loss = self.loss(output, batch)
        return {"loss": phalanx.Loss(loss.total / loss.count, 1)}


@dataclass
class Tied(Measured):
    """Hangs on which of two equal scores is the larger one."""

    def evaluate(self, output: Tensor, batch: dict[str, Any]) -> dict[str, Any]:
        apart = (output * 3.3 / 3.3).sum(1) - output.sum(1)
        return {"loss": self.loss(output, batch), "sign": phalanx.Loss((apart > 0).sum(), len(output))}


def test_all_that_is_measured_is_compared() -> None:
    proof = prove(Measured(), ["dp=2", "fsdp=2,zero=1", "dp=4"], check=False)
    assert proof.holds, proof


def test_a_mean_of_means_is_named_where_it_is() -> None:
    proof = prove(Averaged(), ["dp=2"], check=False)
    finding = proof.results[0].finding
    assert finding is not None
    assert finding.rung == "evaluation"
    assert finding.shape == "mixes samples"
    assert "test_evaluation.py" in finding.where
    assert "Loss(total, count)" in finding.cause


def test_what_rounding_decides_is_said_not_to_be_compared() -> None:
    said = []
    proof = prove(Tied(), ["dp=2"], check=False, on_start=lambda docket: said.extend(docket.hostility))
    assert proof.holds, proof
    assert any("total of sign" in note for note in said)


def test_an_empty_held_out_is_refused() -> None:
    class Empty(Measured):
        def held_out(self) -> Any:
            return []

    with pytest.raises(phalanx.WrongUse, match="held_out is empty"):
        prove(Empty(), ["dp=2"])


def test_how_far_off() -> None:
    ones, nan = torch.ones(3), torch.tensor([1.0, math.nan, 1.0])
    assert off_by(ones, ones.clone()) == off_by(nan, nan.clone()) == off_by(math.nan, math.nan) == 0
    assert off_by(ones, nan) == off_by(torch.ones(2), ones) == off_by(1.0, math.nan) == off_by(["a"], ["b"]) == math.inf
    assert off_by(ones * 1.5, ones) == pytest.approx(0.5)
    assert off_by(torch.tensor([1, 2]), torch.tensor([1, 3])) == math.inf
    assert in_words(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))[0].endswith("samples 1")
    assert [name for name, _ in Measures({"a": (1.0, 2.0)}, {"b": ones}, {"c": 1.0}).items()] == [
        "count of a", "total of a", "b of each sample", "summarised c",
    ]  # fmt: skip


@dataclass
class Ranked(Measured):
    """Measures of ranks, which are whole numbers, as people write them for float32."""

    def evaluate(self, output: Tensor, batch: dict[str, Any]) -> dict[str, Any]:
        rank = (output > output.gather(1, batch["y"].unsqueeze(1))).sum(1)
        gain, reciprocal = 1 / torch.log2(rank + 2.0), (rank + 1).float().reciprocal()
        best = torch.zeros(len(rank), dtype=torch.float32).index_add_(0, torch.arange(len(rank)), gain)
        return {
            "ndcg": phalanx.Loss(gain.sum(), len(gain)), "mrr": phalanx.Loss(reciprocal.sum(), len(gain)),
            "share": phalanx.Loss((rank / 3).sum(), len(gain)), "best": phalanx.Loss(best.sum(), len(gain)),
            "scores": output, "ranks": rank,
        }  # fmt: skip

    def summarise(self, gathered: dict[str, Any]) -> dict[str, float]:
        likely = gathered["scores"].float().softmax(1).amax(1)
        return {"mean rank": gathered["ranks"].to(torch.float32).mean(), "spread": likely.std()}


def test_measures_of_whole_numbers_are_computed_in_float64() -> None:
    said: list[str] = []
    proof = prove(Ranked(), ["dp=2", "fsdp=2"], check=False, on_start=lambda docket: said.extend(docket.hostility))
    assert proof.holds, proof
    assert any("losses and measures are computed in float64" in line for line in said)


@dataclass
class Counted(Measured):
    """A buffer that counts calls, those of an evaluation too."""

    def model(self) -> nn.Module:
        return Scaled()


def test_buffers_that_an_evaluation_moves_are_as_on_one_device() -> None:
    proof = prove(Counted(), ["dp=2", "fsdp=2,micro_batch=3", "micro_batch=5"], check=False)
    assert proof.holds, proof
