"""The kernel of Adam's update, compiled for a GPU that need not be there; what it gives is in `test_adamw`."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from tests.kernels.apart import runs


def compile_all() -> None:
    """The interpreter takes what a compiler does not."""
    import triton

    from phalanx.kernels import adamw_triton as kernels

    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    for copy, flag, moments in product((None, "bfloat16"), (False, True), ("float32", "bfloat16", "uint8")):
        constants = {
            "GRADIENT": kernels.TYPES["bfloat16"], "COPY": kernels.TYPES.get(copy), "MOMENTS": kernels.TYPES[moments],
            "TOGETHER": flag, "DECOUPLED": flag, "EVEN": flag, "BLOCK": kernels.BLOCK, "SPAN": kernels.SPAN,
        }  # fmt: skip
        pointers = {"places": "*i64", "spans": "*i32", "step": "i32"}
        plain = [name for name in kernels._update.arg_names if name not in constants]
        signature = {name: pointers.get(name, "fp32") for name in plain} | dict.fromkeys(constants, "constexpr")
        source = triton.compiler.ASTSource(kernels._update, signature, constants)
        compiled = triton.compile(source, target=target).asm
        assert ("ld.global.v4" in compiled["ptx"]) == flag  # wide words, where all is even


def test_the_kernel_compiles(tmp_path: Path) -> None:
    runs("import tests.kernels.test_adamw_triton as test; test.compile_all()", TRITON_CACHE_DIR=str(tmp_path))
