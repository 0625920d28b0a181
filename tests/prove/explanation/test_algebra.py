"""Shapes of errors, recognised and not mistaken for each other."""

from __future__ import annotations

import pytest
import torch

from phalanx.prove.explanation import algebra

WANT = torch.randn(12, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_a_ratio_is_one_number_everywhere() -> None:
    assert algebra.ratio(WANT * 3, WANT) == pytest.approx(3)
    assert algebra.ratio(WANT, WANT) is None
    assert algebra.ratio(WANT + 0.1, WANT) is None
    assert algebra.ratio(WANT * float("nan"), WANT) is None


def test_a_factor_is_called_by_its_size() -> None:
    sizes = {"tp": 2, "micro-batches": 3, "dp": 4}
    assert algebra.called(2, sizes) == "tp"
    assert algebra.called(1 / 3, sizes) == "1 / micro-batches"
    assert algebra.called(4 / 3, sizes) == "dp / micro-batches"
    assert algebra.called(7.1, sizes) is None
    assert algebra.number(0.75) == "3/4"
    assert algebra.number(-1e-17) == "0"


def test_another_order_is_told_from_other_values() -> None:
    assert algebra.reordered(WANT.roll(1, 0), WANT) == 0
    assert algebra.reordered(WANT[:, torch.randperm(7)], WANT) == 1
    assert algebra.reordered(WANT, WANT) is None
    assert algebra.reordered(torch.randn_like(WANT), WANT) is None


def test_a_lower_precision_is_told_from_a_bug() -> None:
    assert algebra.precision(WANT.to(torch.bfloat16).double(), WANT) == "bfloat16"
    assert algebra.precision(WANT.float().double(), WANT) == "float32"
    assert algebra.precision(WANT + 1e-3 * torch.randn_like(WANT) * WANT.norm(), WANT) is None


def test_single_elements_are_counted() -> None:
    wrong = WANT.clone()
    wrong[3, 3] += 1e-6
    assert algebra.single(wrong, WANT) == 1
    assert algebra.single(WANT * 2, WANT) is None


def test_samples_are_found_in_a_sum() -> None:
    basis = list(torch.randn(5, 12, 7, dtype=torch.float64))
    found = algebra.coefficients(2 * basis[1] + 0.5 * basis[4], basis)
    assert found is not None
    assert found.tolist() == pytest.approx([0, 2, 0, 0, 0.5], abs=1e-9)
    assert algebra.coefficients(torch.randn_like(WANT), basis) is None
