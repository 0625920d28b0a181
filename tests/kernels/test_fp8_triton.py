"""The kernel that transposes 8 bits, compiled for a GPU that need not be there; see `test_fp8` too."""

from __future__ import annotations

from pathlib import Path

from tests.kernels.apart import runs


def compile_all() -> None:
    """The interpreter takes what a compiler does not."""
    import triton

    from phalanx.kernels import fp8_triton as kernels

    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    pointers = {"given": "*u8", "found": "*u8", "top": "*fp32"}
    for behind, bias, last in kernels.BITS.values():
        constants = {"BEHIND": behind, "BIAS": bias, "LAST": last, "BLOCK": kernels.BLOCK}
        plain = [name for name in kernels._transpose.arg_names if name not in constants]
        signature = {name: pointers.get(name, "i32") for name in plain} | dict.fromkeys(constants, "constexpr")
        source = triton.compiler.ASTSource(kernels._transpose, signature, constants)
        assert "cubin" in triton.compile(source, target=target).asm


def test_the_kernel_compiles(tmp_path: Path) -> None:
    runs("import tests.kernels.test_fp8_triton as test; test.compile_all()", TRITON_CACHE_DIR=str(tmp_path))
