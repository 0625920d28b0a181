"""The kernel of sums of squares, compiled for a GPU that need not be there; see `test_squares` too."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from tests.kernels.apart import runs


def compile_all() -> None:
    """The interpreter takes what a compiler does not."""
    import triton

    from phalanx.kernels import squares_triton as kernels

    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    signature = {"places": "*i64", "spans": "*i32", "found": "*fp32"}
    for dtype, even in product(kernels.TYPES.values(), (True, False)):
        constants = {"TYPE": dtype, "EVEN": even, "BLOCK": kernels.BLOCK, "SPAN": kernels.SPAN}
        source = triton.compiler.ASTSource(
            kernels._squares, signature | dict.fromkeys(constants, "constexpr"), constants
        )
        assert "cubin" in triton.compile(source, target=target).asm


def test_the_kernel_compiles(tmp_path: Path) -> None:
    runs("import tests.kernels.test_squares_triton as test; test.compile_all()", TRITON_CACHE_DIR=str(tmp_path))
