"""What devices can compute at most: published dense rates, in TFLOP/s, by the name that torch gives a device.

Products of 16 bits are those that accumulate in 32, as training does. Rates with sparsity are left out. A device that
is not here has no known peak: a guess would make every utilisation wrong.
"""

from __future__ import annotations

import re

import torch

FIGURES: dict[str, dict[str, float]] = {
    r"H100 80GB HBM3|H200|GH200 .*": {"bf16": 989.4, "fp16": 989.4, "fp8": 1978.9, "tf32": 494.7, "fp32": 66.9},
    r"H100 NVL|H200 NVL": {"bf16": 835.5, "fp16": 835.5, "fp8": 1671, "tf32": 417.5, "fp32": 60.0},
    r"H100 PCIe": {"bf16": 756, "fp16": 756, "fp8": 1513, "tf32": 378, "fp32": 51.0},
    r"B200": {"bf16": 2250, "fp16": 2250, "fp8": 4500, "tf32": 1125, "fp32": 75.0},
    r"GB200": {"bf16": 2500, "fp16": 2500, "fp8": 5000, "tf32": 1250, "fp32": 80.0},
    r"A100[- ].*": {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5},
    r"A30": {"bf16": 165, "fp16": 165, "tf32": 82, "fp32": 10.3},
    r"A10": {"bf16": 125, "fp16": 125, "tf32": 62.5, "fp32": 31.2},
    r"L4": {"bf16": 121, "fp16": 121, "fp8": 242, "tf32": 60, "fp32": 30.3},
    r"L40S": {"bf16": 362, "fp16": 362, "fp8": 733, "tf32": 183, "fp32": 91.6},
    r"L40": {"bf16": 181, "fp16": 181, "fp8": 362, "tf32": 90.5, "fp32": 90.5},
    r"RTX A6000": {"bf16": 154.8, "fp16": 154.8, "tf32": 77.4, "fp32": 38.7},
    r"V100-SXM2-.*": {"fp16": 125, "fp32": 15.7},
    r"V100-PCIE-.*": {"fp16": 112, "fp32": 14.0},
    r"T4": {"fp16": 65, "fp32": 8.1},
    r"GeForce RTX 4090": {"bf16": 165.2, "fp16": 165.2, "fp8": 330.3, "tf32": 82.6, "fp32": 82.6},
    r"GeForce RTX 3090": {"bf16": 71, "fp16": 71, "tf32": 35.6, "fp32": 35.6},
    r"Instinct MI250X.*": {"bf16": 191.5, "fp16": 191.5, "fp32": 47.9},  # of one of its two dies, a device of torch's
    r"Instinct MI300X.*": {"bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9, "tf32": 653.7, "fp32": 163.4},
}
"""By a pattern of a device's name without its maker's."""
KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def peak_rate(device: str, dtype: torch.dtype, fp8: bool = False) -> float | None:
    """FLOP/s of products in this dtype at most; None: not known. ``fp8``: most products are of 8 bits."""
    name = re.sub(r"^(NVIDIA|AMD|Tesla) ", "", device)
    rates = next((rates for pattern, rates in FIGURES.items() if re.fullmatch(pattern, name)), {})
    kind = "fp8" if fp8 else KINDS.get(dtype, "")
    if kind == "fp32" and rates and _in_tf32():
        kind = "tf32"
    return 1e12 * rates[kind] if kind in rates else None


def _in_tf32() -> bool:
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # it was set by torch's newer names, which refuses to be asked by this one
        return torch.backends.cuda.matmul.fp32_precision == "tf32"
