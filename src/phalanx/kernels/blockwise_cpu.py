"""`blockwise` on a processor, compiled when it is first used: one pass over memory, and the same bits.

torch's loader of extensions builds it once for a host and a kind of processor. Where there is no compiler, the twin is
used and a warning says so.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.kernels.blockwise import BLOCKS, FULL, block_bytes
from phalanx.kernels.blockwise import encode as plain_encode

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ["-O3", "-ffp-contract=off", "-std=c++17"]
ARCHITECTURE = {"AVX512": "-march=x86-64-v4", "AVX2": "-march=x86-64-v3"}
"""By what torch finds this processor can do."""


def used(x: Tensor) -> bool:
    """For numbers like these: a proof's, in float64, are the twin's."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and library() is not None


def encode(
    x: Tensor, bits: int, full: float, out: Tensor, owed: Tensor | None = None, left: Tensor | None = None,
    counts: Tensor | None = None,
) -> None:  # fmt: skip
    """See the twin."""
    _call("phalanx_encode", x, owed, left, out, len(x) // BLOCKS[bits], bits, full, counts)


def decode(rows: Tensor, bits: int, out: Tensor, counts: Tensor | None = None) -> None:
    """See the twin."""
    _call("phalanx_decode", rows, out, len(rows), len(out) // BLOCKS[bits], bits, counts)


def _call(name: str, *given: Tensor | float | None) -> None:
    found = library()
    assert found is not None
    assert all(each.is_contiguous() for each in given if isinstance(each, Tensor))
    getattr(found, name)(*map(_word, given))


def _word(value: Tensor | float | None) -> Any:
    if isinstance(value, float):
        return ctypes.c_float(value)
    if isinstance(value, int):
        return ctypes.c_int64(value)
    return ctypes.c_void_p(None if value is None else value.data_ptr())


@cache
def library() -> ctypes.CDLL | None:
    """What was compiled, here or before; None: it cannot be."""
    try:
        found = ctypes.CDLL(str(_built()))
        if not _agrees(found):
            raise RuntimeError("it does not find what its plain twin does")
        return found
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        warnings.warn(
            f"codes of few bits are made by torch's operations, several times slower: a compiled kernel cannot be had "
            f"({reason}). Install a C++ compiler and ninja.",
            stacklevel=3,
        )
        return None


def _built() -> Path:
    """The library, built by whoever comes first."""
    capability = torch.backends.cpu.get_cpu_capability()
    flags = [*FLAGS, *([ARCHITECTURE[capability]] if capability in ARCHITECTURE else [])]
    told = hashlib.sha256(SOURCE.read_bytes() + " ".join([*flags, platform.machine()]).encode()).hexdigest()[:16]
    name = f"phalanx_blockwise_{told}"
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
    folder = Path(root) / name
    whole = folder / "whole.so"
    if whole.exists():
        return whole
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not whole.exists():
            from torch.utils.cpp_extension import load

            # the folder may be of several hosts, and the lock of one: each builds apart, and the first one's is used
            with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as own:
                built = load(name, [str(SOURCE)], extra_cflags=flags, build_directory=own, is_python_module=False)
                if not whole.exists():
                    os.replace(built, whole)
    return whole


def _agrees(found: ctypes.CDLL) -> bool:
    """Whether it gives what the twin gives, for a few numbers."""
    for bits, size in BLOCKS.items():
        x = torch.linspace(-3, 5, 2 * size)
        own, twin = (torch.empty(2 * block_bytes(bits, x.dtype), dtype=torch.uint8) for _ in range(2))
        plain_encode(x, bits, FULL[bits], twin)
        pointers = [ctypes.c_void_p(at) for at in (x.data_ptr(), 0, 0, own.data_ptr())]
        found.phalanx_encode(*pointers, ctypes.c_int64(2), ctypes.c_int64(bits), ctypes.c_float(FULL[bits]), None)
        if not torch.equal(own, twin):
            return False
    return True
