"""What held-out data gives is told apart: counts that are off, and measures that mix samples."""

from __future__ import annotations

import pytest

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
    assert mixing(hostile(Measured(), Trial(3))) == ""
    task = hostile(Averaged(), Trial(3))
    assert mixing(task)
    finding = explain_evaluation(task, [COUNT], ["dp"], "dp=2")
    assert finding.shape == "mixes samples"
    assert "test_evaluation.py" in finding.where
