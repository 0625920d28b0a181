"""The kernel that widens codes of 4 bits is its twin, to the bit: interpreted on a processor, compiled on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phalanx.kernels import nf4 as plain
from phalanx.kernels.choice import NARROW
from tests.kernels.apart import runs


def compare(device: str) -> None:
    from phalanx.kernels.nf4_triton import BYTES, widen

    for blocks in (1, 31, 2 * BYTES // plain.BLOCK, 2 * BYTES // plain.BLOCK + 1):
        packed = torch.randint(0, 256, (blocks * plain.BLOCK // 2,), dtype=torch.uint8, device=device)
        scale = torch.randn(blocks, device=device) * torch.exp2(20 * torch.randn(blocks, device=device))
        for dtype in NARROW if device == "cuda" else NARROW[1:]:  # interpreted, bfloat16 is cut off, not rounded
            found, twin = (torch.empty(2 * len(packed), dtype=dtype, device=device) for _ in range(2))
            widen(packed, scale, plain.table(packed.device), found)
            plain._widen(packed, scale, twin)
            assert torch.equal(found, twin), (blocks, dtype)


def compile_all() -> None:
    """The interpreter takes what a compiler does not."""
    import triton

    from phalanx.kernels import nf4_triton as kernels

    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    constants = {"HALF": plain.BLOCK // 2, "BYTES": kernels.BYTES}
    pointers = {"packed": "*u8", "scale": "*fp32", "table": "*fp32", "found": "*bf16", "count": "i32"}
    source = triton.compiler.ASTSource(kernels._widen, pointers | dict.fromkeys(constants, "constexpr"), constants)
    assert "cubin" in triton.compile(source, target=target).asm


def test_it_is_its_twin() -> None:
    runs("import tests.kernels.test_nf4_triton as test; test.compare('cpu')", TRITON_INTERPRET="1")


def test_it_compiles(tmp_path: Path) -> None:
    runs("import tests.kernels.test_nf4_triton as test; test.compile_all()", TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.gpu
def test_it_is_its_twin_on_a_gpu() -> None:
    compare("cuda")
