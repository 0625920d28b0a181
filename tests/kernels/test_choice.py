"""Kernels are used where they work, and nobody notices where they do not but by a warning."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
import torch

from phalanx.kernels.choice import Kernel

CPU = torch.device("cpu")


def test_kernels_that_do_not_work_are_not_used() -> None:
    pytest.importorskip("triton", reason="triton is not installed (the dev extra has it)")

    def broken(device: torch.device) -> bool:
        raise OSError("no C compiler\nwas found")

    with pytest.warns(UserWarning, match=r"the kernel of sums is not used on cpu: OSError: no C compiler$"):
        assert not Kernel("sums", broken).works(CPU)
    with pytest.warns(UserWarning, match="not used on cpu: it does not find what its plain twin does"):
        assert not Kernel("sums", lambda device: False).works(CPU)


def test_ranks_agree_on_every_kernel_that_a_run_has() -> None:
    program = "import phalanx.train.engine; from phalanx.kernels import choice; print([k.name for k in choice.KERNELS])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert sorted(ast.literal_eval(done.stdout)) == [
        "Adam's update",
        "FlashAttention 4",
        "FlashAttention 4 of packed documents",
        "codes of few bits",
        "packed attention",
        "sums of squares",
        "the cross-entropy",
        "transposing 8 bits",
        "weights in 4 bits",
    ]


def test_a_device_is_tried_once() -> None:
    pytest.importorskip("triton", reason="triton is not installed (the dev extra has it)")
    tried: list[torch.device] = []

    def trial(device: torch.device) -> bool:
        tried.append(device)
        return True

    kernel = Kernel("sums", trial)
    assert kernel.works(CPU)
    assert kernel.works(CPU)
    assert tried == [CPU]


def test_processors_and_proofs_have_the_twin() -> None:
    kernel = Kernel("sums", lambda device: True)
    assert not kernel.used(torch.zeros(1))
    assert not kernel.used(torch.zeros(1, dtype=torch.float64, device="meta"))
