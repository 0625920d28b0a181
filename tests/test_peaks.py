"""Peak rates: by the names that devices have, and none for a device that is not known."""

from __future__ import annotations

import pytest
import torch

from phalanx.peaks import peak_rate


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756),
        ("NVIDIA H200", torch.float16, 989.4),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),
        ("NVIDIA A100 80GB PCIe", torch.float32, 19.5),
        ("NVIDIA A10", torch.bfloat16, 125),
        ("NVIDIA L4", torch.bfloat16, 121),
        ("Tesla V100-SXM2-32GB", torch.float16, 125),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165.2),
        ("AMD Instinct MI300X", torch.bfloat16, 1307.4),
    ],
)
def test_known_devices(name: str, dtype: torch.dtype, tera: float) -> None:
    assert peak_rate(name, dtype) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("NVIDIA A10G", torch.bfloat16),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", torch.bfloat16),
        ("Tesla V100-SXM2-32GB", torch.bfloat16),
        ("NVIDIA H200", torch.float64),
        ("cpu", torch.float32),
    ],
)
def test_what_is_not_known_has_no_peak(name: str, dtype: torch.dtype) -> None:
    assert peak_rate(name, dtype) is None


def test_products_in_fewer_bits_have_a_peak_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_rate("NVIDIA H200", torch.bfloat16, fp8=True) == pytest.approx(1978.9e12)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert peak_rate("NVIDIA H200", torch.float32) == pytest.approx(494.7e12)


def test_a_precision_set_by_torchs_newer_names_is_understood() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert peak_rate("cpu", torch.float32) is None
        assert peak_rate("NVIDIA H200", torch.float32) == pytest.approx(494.7e12)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
