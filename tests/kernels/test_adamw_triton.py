"""The kernel of Adam's update, compiled for a GPU that need not be there; what it gives is in `test_adamw`."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest


def compile_all() -> None:
    """The interpreter takes what a compiler does not."""
    import triton

    from phalanx.kernels import adamw_triton as kernels

    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    for copy, flag in product((None, kernels.TYPES["bfloat16"]), (False, True)):
        constants = {
            "GRADIENT": kernels.TYPES["bfloat16"], "COPY": copy, "DECOUPLED": flag, "EVEN": flag,
            "BLOCK": kernels.BLOCK, "SPAN": kernels.SPAN,
        }  # fmt: skip
        pointers = {"places": "*i64", "spans": "*i32"}
        plain = [name for name in kernels._update.arg_names if name not in constants]
        signature = {name: pointers.get(name, "fp32") for name in plain} | dict.fromkeys(constants, "constexpr")
        source = triton.compiler.ASTSource(kernels._update, signature, constants)
        compiled = triton.compile(source, target=target).asm
        assert ("ld.global.v4" in compiled["ptx"]) == flag  # wide words, where all is even


def test_the_kernel_compiles(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed (the dev extra has it)")
    program = "import tests.kernels.test_adamw_triton as test; test.compile_all(); print('compiled')"
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True,
        text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout.strip() == "compiled", done.stderr
