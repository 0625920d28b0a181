"""Kernels of the cross-entropy, compiled for a GPU that need not be there; see `test_cross_entropy` too."""

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

    from phalanx.kernels import cross_entropy_triton as kernels

    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    pointers = {"logits": "*bf16", "index": "*i64", "valid": "*i1"}
    numbers = dict.fromkeys(("stride", "classes"), "i32")
    for kernel, kind in product((kernels._statistics, kernels._gradient), (0, 1, 2)):
        plain = [name for name in kernel.arg_names if name not in ("KIND", "BLOCK")]
        floats = dict.fromkeys(("share", "rest", "inner", "outer"), "fp32")
        signature = {name: (pointers | numbers | floats).get(name, "*fp32") for name in plain}
        constants = {"KIND": kind, "BLOCK": kernels.BLOCK}
        source = triton.compiler.ASTSource(kernel, {**signature, "KIND": "constexpr", "BLOCK": "constexpr"}, constants)
        assert "cubin" in triton.compile(source, target=target).asm


def test_kernels_compile(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed (the dev extra has it)")
    program = "import tests.kernels.test_cross_entropy_triton as test; test.compile_all(); print('compiled')"
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True,
        text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout.strip() == "compiled", done.stderr
