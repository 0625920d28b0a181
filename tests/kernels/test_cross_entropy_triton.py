"""Kernels of the cross-entropy, compiled for a GPU that need not be there; see `test_cross_entropy` too."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from tests.kernels.apart import runs


def compile_all() -> None:
    """The interpreter takes what a compiler does not."""
    import triton

    from phalanx.kernels import cross_entropy_triton as kernels

    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    numbers = dict.fromkeys(("stride", "spacing", "classes"), "i32")
    for kernel, kind, into in product((kernels._statistics, kernels._gradient), (0, 1, 2), ("*bf16", "*fp8e5")):
        pointers = {"logits": "*bf16", "gradients": into, "index": "*i64", "valid": "*i1"}
        constants = {"KIND": kind, "WHOLE": 15 * 4 * kernels.LANES, "END": 63 * kernels.LANES}
        constants |= {"LANES": kernels.LANES, "BLOCK": kernels.BLOCK}
        constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
        plain = [name for name in kernel.arg_names if name not in constants]
        floats = dict.fromkeys(("factor", "share", "rest", "inner", "outer"), "fp32")
        signature = {name: (pointers | numbers | floats).get(name, "*fp32") for name in plain}
        source = triton.compiler.ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants)
        assert "cubin" in triton.compile(source, target=target).asm
    signature = {"given": "*fp32", "factor": "*fp32", "found": "*bf16", "size": "i64", "BLOCK": "constexpr"}
    source = triton.compiler.ASTSource(kernels._scale, signature, {"BLOCK": kernels.BLOCK})
    assert "cubin" in triton.compile(source, target=target).asm


def test_kernels_compile(tmp_path: Path) -> None:
    runs("import tests.kernels.test_cross_entropy_triton as test; test.compile_all()", TRITON_CACHE_DIR=str(tmp_path))
