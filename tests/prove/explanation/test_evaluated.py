"""What held-out data gives is told apart: counts that are off, and measures that mix samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from phalanx import Loss
from phalanx.prove.explanation.evaluated import explain_evaluation, mixing
from phalanx.prove.ladder import Difference
from phalanx.prove.reference.hostile import Trial, hostile
from tests.prove.reference.test_evaluation import Averaged, Measured

COUNT = Difference(2, "evaluation", "count of loss", 0.5, 0, "30", "20")


def test_a_count_leads_and_is_told_as_a_ratio() -> None:
    total = Difference(2, "evaluation", "total of loss", 0.9, 0, "3.0", "2.0")
    finding = explain_evaluation(hostile(Measured(), Trial(3)), [total, COUNT], ["dp"], "dp=2")
    assert (finding.name, finding.affected, finding.shape) == ("count of loss", ["total of loss"], "ratio")
    assert finding.factor == pytest.approx(1.5)
    assert "train/evaluate.py" in finding.where


def test_a_measure_that_mixes_samples_is_the_tasks_own() -> None:
    assert mixing(hostile(Measured(), Trial(3))) == ("", 0.0)
    task = hostile(Averaged(), Trial(3))
    assert mixing(task)[0]
    finding = explain_evaluation(task, [COUNT], ["dp"], "dp=2")
    assert finding.shape == "mixes samples"
    assert "test_evaluation.py" in finding.where


class Rounded(Measured):
    """Sums in float32, in numpy."""

    def evaluate(self, output: Tensor, batch: dict[str, Any]) -> dict[str, Any]:
        rounded = output.square().sum(1).numpy().astype(np.float32)
        return {"squares": Loss(torch.from_numpy(rounded).sum(), len(rounded))}


def test_a_measure_that_is_rounded_where_it_cannot_be_seen_is_told_so() -> None:
    total = Difference(2, "evaluation", "total of squares", 1e-8, 0, "2.00000002", "2.0")
    finding = explain_evaluation(hostile(Rounded(), Trial(3)), [total], ["dp"], "dp=2")
    assert finding.shape == "precision"
    assert "Compute it in float64" in finding.cause
    assert "mixes" not in finding.cause
    assert "test_evaluated.py" in finding.where
