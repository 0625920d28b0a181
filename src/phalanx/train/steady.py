"""One way to compute, at any number of ranks: as many threads, and kernels that do the same with every element."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.deterministic
from torch import optim

from phalanx.cluster import threads

MEMORY: Any = torch.utils.deterministic
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def steady(device: torch.device) -> Callable[[], None]:
    """From here on the same inputs give the same bits; what is returned puts everything back.

    A matrix product's sums are cut by thread, so their number may not follow that of the ranks. Operations that add in
    whatever order threads come are replaced by torch, or refused by it.
    """
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), os.environ.get(WORKSPACE)
    torch.set_num_threads(threads(1))
    torch.use_deterministic_algorithms(True)
    filling = MEMORY.fill_uninitialized_memory
    MEMORY.fill_uninitialized_memory = False  # ours is always written before it is read
    if device.type == "cuda":
        os.environ.setdefault(WORKSPACE, ":4096:8")  # without it cuBLAS may choose, and torch refuses

    def undo() -> None:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])
        MEMORY.fill_uninitialized_memory = filling
        if before[2] is None:
            os.environ.pop(WORKSPACE, None)

    return undo


def in_one_way(optimizer: optim.Optimizer, device: torch.device) -> None:
    """Have every element updated alike, wherever in a rank's rows it lies.

    On a CPU, torch's fused kernels round a tensor's last few elements otherwise than the rest (they multiply and add in
    one, or in two), and which elements are last depends on the rows a rank has. The plain ones do not, and take 4 ns a
    weight for 1.
    """
    if device.type == "cpu":
        for group in optimizer.param_groups:
            if group.get("fused"):
                group["fused"] = False
