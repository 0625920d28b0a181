"""What is compiled is the twin, to the bit; without a compiler the twin is used, and that is said."""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from phalanx.kernels import blockwise, blockwise_cpu


@pytest.mark.parametrize("bits", [8, 4, 1])
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e-42, 1e30])
def test_it_is_its_twin(bits: int, size: float) -> None:
    if blockwise_cpu.library() is None:
        pytest.skip("there is no compiler")
    seed, blocks = torch.seed(), 64
    x, owed = size * torch.randn(2, blocks * blockwise.BLOCKS[bits])
    x[: blockwise.BLOCKS[bits]] = 0
    x[-1], x[-2 * blockwise.BLOCKS[bits]] = math.nan, math.inf
    found = []
    for way in (blockwise, blockwise_cpu):
        for more in (None, owed):
            out = torch.empty(blocks * blockwise.block_bytes(bits, x.dtype), dtype=torch.uint8)
            left, total = torch.zeros_like(x), torch.empty_like(x)
            way.encode(x, bits, blockwise.FULL[bits] - 1 / 16, out, more, left)
            way.decode(torch.stack([out, out.roll(len(out) // blocks)]), bits, total)
            found.append((out, left.nan_to_num(), total.nan_to_num()))
    for twin, own in zip(found[:2], found[2:], strict=True):
        clean = [a.equal(b) for a, b in zip(twin, own, strict=True)]
        assert clean[1:] == [True, True], seed
        assert clean[0] or size == 1.0e-42, seed  # a scale that is no number may be so in other bits


def test_float64_is_the_twins() -> None:
    assert not blockwise_cpu.used(torch.zeros(1, dtype=torch.float64))


def test_without_a_compiler_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    monkeypatch.setenv("CXX", "no-compiler")
    blockwise_cpu.library.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"several times slower.*Install a C\+\+ compiler and ninja"):
            assert blockwise_cpu.library() is None
    finally:
        blockwise_cpu.library.cache_clear()


def test_hosts_that_share_a_folder_and_no_lock_build_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if blockwise_cpu.library() is None:
        pytest.skip("there is no compiler")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr("fcntl.flock", lambda *given: None)
    building = multiprocessing.get_context("fork")
    hosts = [building.Process(target=blockwise_cpu._built) for _ in range(2)]
    for host in hosts:
        host.start()
    for host in hosts:
        host.join()
    assert [host.exitcode for host in hosts] == [0, 0]
    whole = blockwise_cpu._built()
    assert sorted(path.name for path in whole.parent.iterdir()) == ["building", "whole.so"]
    assert blockwise_cpu._agrees(ctypes.CDLL(str(whole)))
